// A run's health in one line: the verdict, the figures of its last steps, and advice.

import { api } from "./api.js";
import { fill, h, helpLink } from "./dom.js";
import { duration, num } from "./format.js";

const EVERY_MS = 4000;
const TONES = { healthy: "good", attention: "warn", waiting: "busy", paused: "warn", failed: "bad", ended: "done" };
const share = (value) => `${Math.round(100 * value)} %`;

/** The known figures: [name, text]. */
const figures = (health) =>
	[
		["a step", health.seconds_per_step, duration],
		["left", health.seconds_left || null, duration],
		["errors", health.errors, share],
		["without signal", health.without_signal, share],
		["maximum staleness", health.worst_staleness, num],
	]
		.filter(([, value]) => value !== null)
		.map(([name, value, show]) => [name, show(value)]);

/** The line of run `id`. `update()` refreshes it, now and then; unknown figures are left out. */
export function healthLine(id, signal) {
	const element = h("section", { class: "health", "aria-label": "Health", hidden: true });
	let asked = 0;
	let painted = "";

	function paint(health) {
		const text = JSON.stringify(health);
		if (text === painted) return;
		painted = text;
		const open = element.querySelector("details")?.open;
		const advice = health.findings.map((it) => h("li", {}, h("b", {}, it.title), `: ${it.message}. ${it.advice} `, helpLink(it.help)));
		element.hidden = false;
		fill(
			element,
			h("p", {}, h("span", { class: `mark ${TONES[health.verdict]}` }, health.verdict), " ", health.message),
			h("dl", {}, figures(health).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
			health.waits && h("p", { class: "sub" }, health.waits),
			advice.length ? h("details", { open }, h("summary", {}, `What to do (${advice.length})`), h("ul", {}, advice)) : null,
		);
	}

	return {
		element,
		async update(soon = false) {
			if (!soon && Date.now() - asked < EVERY_MS) return;
			asked = Date.now();
			try {
				paint(await api.health(id, signal));
			} catch {
				// The page reports the API's failure elsewhere; an old verdict would be misleading.
				element.hidden = true;
				painted = "";
			}
		},
	};
}
