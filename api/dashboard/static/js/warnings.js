// The warnings at the head of a run's page: those of its last steps. Older ones are events only.

import { api } from "./api.js";
import { h, pageOf } from "./dom.js";
import { clock, count, unix } from "./format.js";
import { ended } from "./live.js";

const TYPE = "run.warning";
/** As many steps count as 'now' for the health of a run. */
const LATELY = 10;
const SHOWN = 3;

/** Whether a run failed or stands still for a reason of its own, which its health says. */
export const stopped = (run) => Boolean(run.error || run.paused_because);

export class Warnings {
	constructor(id, signal) {
		this.id = id;
		this.signal = signal;
		this.known = new Map();
		this.loading = null;
	}

	onEvent(event) {
		if (event.type === TYPE) this.known.set(event.id, event);
	}

	/** Loads the newest once; what fails is tried again at the next call. */
	load() {
		this.loading ??= api.events(this.id, { types: TYPE, order: "desc", limit: 20 }, this.signal).then(
			({ data }) => data.forEach((event) => this.onEvent(event)),
			() => (this.loading = null),
		);
		return this.loading;
	}

	/** The warnings of the last steps, the newest first, while `run` goes on, and a link to earlier ones. */
	shown(run) {
		const all = [...this.known.values()].sort((a, b) => unix(b.created_at) - unix(a.created_at));
		const lately = stopped(run) || ended(run) ? [] : all.filter(({ data }) => data.step > run.step - LATELY).slice(0, SHOWN);
		const items = lately.map((event) => h("li", {}, event.message, h("small", {}, ` step ${count(event.data.step)}, ${clock(unix(event.created_at))}`)));
		return [
			items.length ? h("ul", { class: "warnings", "aria-label": "Warnings" }, items) : null,
			all.length > items.length && h("p", { class: "sub" }, h("a", { href: pageOf(run.id, "events?level=warning") }, "Earlier warnings")),
		];
	}
}
