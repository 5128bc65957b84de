// A run's health in one line: the verdict, the figures of its last steps, and advice.

import { api } from "./api.js";
import { fill, h, helpLink } from "./dom.js";
import { clock, count, duration, num, unix } from "./format.js";

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
		.filter(([, value]) => value !== null && value !== undefined)
		.map(([name, value, show]) => [name, show(value)]);

/** Since which step and when there is a finding, in words; '' if neither is known. */
function sinceText({ rule, since_step: step, since_earlier: earlier, since }) {
	const at = since && clock(unix(since));
	const word = ["paused", "held", "failed", "failed_early"].includes(rule) ? "at" : "since";
	if (step === null) return at ? `since ${at}` : "";
	return `${word} step ${count(step)}${earlier ? " or before" : ""}${at && !earlier ? `, ${at}` : ""}`;
}

/** A text whose parts in backticks are code. */
const coded = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** The health of a run whose health cannot be judged, for example while its store is away, but which has stopped. */
const unjudged = (run) => {
	const message = run.error?.message ?? run.paused_because;
	return message && { verdict: run.error ? "failed" : "paused", message, findings: [] };
};

/**
 * The line of run `id`. `update(run)` refreshes it, now and then; unknown figures are left out. It
 * is the one place that says why a run stopped; `resume` is called to go on with one that paused itself.
 */
export function healthLine(id, signal, resume) {
	const element = h("section", { class: "health", "aria-label": "Health", hidden: true });
	let asked = 0;
	let painted = "";
	let stood = false;

	function paint(health) {
		const text = JSON.stringify(health);
		if (text === painted) return;
		painted = text;
		// A run that stopped needs somebody, whom the advice is for.
		const stopped = health.verdict === "failed" || health.findings.some(({ rule }) => rule === "paused" || rule === "held");
		const open = stopped || (!stood && element.querySelector("details")?.open);
		stood = stopped;
		const said = ({ message }) => (message === health.message ? ". " : `: ${message}. `);
		const more = health.message.startsWith(`${health.verdict} `) ? health.message.slice(health.verdict.length + 1) : health.message;
		const first = health.findings.find(({ message, level }) => level === "warning" && health.message.startsWith(message));
		const advice = health.findings.map((it) => h("li", {}, h("b", {}, it.title), it !== first && h("small", {}, ` ${sinceText(it)}`), said(it), coded(it.advice), " ", helpLink(it.help), ["paused", "failed"].includes(it.rule) && [" ", h("button", { class: "small primary", onclick: resume }, "Resume")], it.rule === "failed_early" && [" ", h("a", { class: "button small primary", href: `#/launch?from=${encodeURIComponent(id)}` }, "Launch a copy")]));
		element.hidden = false;
		fill(
			element,
			h("p", { role: stopped ? "alert" : null }, h("span", { class: `mark ${TONES[health.verdict]}` }, health.verdict), " ", more, first && h("small", {}, ` ${sinceText(first)}`)),
			h("dl", {}, figures(health).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
			health.waits && h("p", { class: "sub" }, health.waits),
			advice.length ? h("details", { open }, h("summary", {}, `What to do (${advice.length})`), h("ul", {}, advice)) : null,
		);
	}

	return {
		element,
		async update(run) {
			if (Date.now() - asked < EVERY_MS) return;
			asked = Date.now();
			const health = await api.health(id, signal).catch(() => unjudged(run));
			if (health) return paint(health);
			// The page reports the API's failure elsewhere; an old verdict would be misleading.
			element.hidden = true;
			painted = "";
		},
	};
}
