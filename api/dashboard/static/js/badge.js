// A run's state in words.

import { h } from "./dom.js";
import { duration, unix } from "./format.js";

const TONES = { running: "good", starting: "busy", queued: "busy", pausing: "busy", stopping: "busy", paused: "warn", succeeded: "done", failed: "bad" };

export const badge = (status) => h("span", { class: `badge ${TONES[status] ?? "off"}` }, status);

/** What the run waits for, why it failed, or nothing. */
export function waitingText(run) {
	if (run.error) return `${run.error.code}: ${run.error.message}`;
	if (!run.waiting_for) return run.end_reason ?? "";
	const { name, since } = run.waiting_for;
	return since ? `${name} · ${duration(Date.now() / 1000 - unix(since))}` : name;
}
