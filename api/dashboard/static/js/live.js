// Keeps a page up to date: by the run's event stream where there is one, else every two seconds.

import { ENDED } from "../contract.js";
import { follow } from "./api.js";
import { throttled, toast } from "./dom.js";
import { duration } from "./format.js";

const POLL_MS = 2000;
const GAUGES_MS = 5000;
const BRIEF_MS = 3000;
const LABELS = { live: "Live", polling: "Every 2 s", reconnecting: "Reconnecting…", ended: "" };

export const ended = (run) => ENDED.includes(run?.status);

/** Shows in the header how the page is kept up to date. */
export function showLink(state) {
	const place = document.getElementById("link");
	place.textContent = LABELS[state] ?? "";
	place.dataset.state = state;
}

/**
 * Calls `tick` (async, returns the run) at once, at each event, and now and then. A hidden page
 * pauses: browsers allow few connections to one server. `onEvent` gets each event as it arrives;
 * `onGap` is called when some will never arrive.
 */
export function keepUp(id, tick, onEvent = () => {}, onGap = () => {}) {
	const stop = new AbortController();
	let current = null;
	let timer = 0;
	let last = null;
	let over = false;
	let busy = false;
	let again = false;
	let lostAt = null;

	/** Shows once, and only after a noticeable loss, that the page is up to date again. */
	const linked = (state) => {
		if (state === "reconnecting") lostAt ??= Date.now();
		else if (lostAt !== null) {
			if (Date.now() - lostAt > BRIEF_MS) toast(`Back after ${duration((Date.now() - lostAt) / 1000)}`, "good");
			lostAt = null;
		}
		showLink(over ? "ended" : state);
	};

	const refresh = async () => {
		if (stop.signal.aborted || document.hidden) return;
		if (busy) {
			again = true;
			return;
		}
		busy = true;
		try {
			over = ended(await tick());
		} catch (error) {
			// A run that does not exist may come to be; until then nothing is lost.
			if (error.status === 404) over = true;
			else if (error.name !== "AbortError") showLink("reconnecting");
		}
		busy = false;
		if (over) showLink("ended");
		if (again) {
			again = false;
			soon();
		}
	};
	const soon = throttled(refresh, 1000);

	const every = (ms) => {
		clearInterval(timer);
		// A run that has ended may be resumed; it is checked now and then.
		let rests = 0;
		timer = setInterval(() => {
			if (over && ++rests % 8) return;
			refresh();
		}, ms);
	};

	const begin = async () => {
		if (current || document.hidden || stop.signal.aborted) return;
		current = new AbortController();
		const { signal } = current;
		every(GAUGES_MS);
		const streamed = await follow(id, {
			signal,
			last,
			onState: linked,
			onGap: () => {
				last = null;
				onGap();
				soon();
			},
			onEvent: (event, at) => {
				last = at;
				if (!event) return;
				onEvent(event);
				soon();
			},
		});
		if (!streamed && !signal.aborted) {
			showLink(over ? "ended" : "polling");
			every(POLL_MS);
		}
	};
	const rest = () => {
		current?.abort();
		current = null;
		clearInterval(timer);
	};
	const seen = () => (document.hidden ? rest() : (begin(), refresh()));
	document.addEventListener("visibilitychange", seen);
	refresh();
	begin();
	return {
		refresh,
		stop() {
			stop.abort();
			rest();
			document.removeEventListener("visibilitychange", seen);
			showLink("ended");
		},
	};
}
