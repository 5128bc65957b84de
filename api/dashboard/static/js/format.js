// Numbers, times and the state of a run, formatted for people.

import { h } from "./dom.js";

/** A number in at most five significant characters; '–' for null. */
export function num(value) {
	if (value === null || value === undefined || Number.isNaN(value)) return "–";
	const size = Math.abs(value);
	if (size === 0) return "0";
	if (size < 1e-3 || size >= 1e7) return value.toExponential(1);
	if (size >= 1e4) return `${Number((value / 1e3).toFixed(size >= 1e5 ? 0 : 1))}k`;
	if (Number.isInteger(value)) return String(value);
	return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 3 : 4);
}

/** A whole number with separated thousands. */
export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

/** A number at an axis, without needless digits. */
export const tick = (value) => (Math.abs(value) >= 1e4 ? num(value) : String(Number(value.toPrecision(4))));

/** Bytes as '12 KiB', '1.8 MiB', '3.1 GiB'. */
export function bytes(size) {
	if (size < 1024) return `${size} B`;
	const power = Math.min(Math.floor(Math.log2(size) / 10), 4);
	return `${Number((size / 1024 ** power).toPrecision(3))} ${" KMGT"[power]}iB`;
}

/** Seconds as '12 s', '4 min 5 s', '3 h 10 min', '2 d 4 h'. */
export function duration(seconds) {
	if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
	const s = Math.max(0, seconds);
	if (s < 10) return `${s < 1 ? s.toFixed(2) : s.toFixed(1)} s`;
	// Rounded before it is split, so that no part of it is rounded up to 60.
	const whole = Math.round(s);
	if (whole < 60) return `${whole} s`;
	if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
	if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
	return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export const unix = (iso) => (iso ? Date.parse(iso) / 1000 : null);

/** How long ago an ISO time was. */
export const ago = (iso) => (iso ? `${duration(Date.now() / 1000 - unix(iso))} ago` : "–");

/** The local clock time of a Unix time, with the date unless it is today. */
export function clock(seconds) {
	const date = new Date(seconds * 1000);
	const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
	const today = date.toDateString() === new Date().toDateString();
	return today ? time : `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

const NAMED = 20;

/** One line about what is left out because it is damaged; '' for nothing. */
export const damageLine = (what, names) =>
	names.length ? `Damaged ${what}, left out: ${names.slice(0, NAMED).join(", ")}${names.length > NAMED ? ` and ${names.length - NAMED} more` : ""}.` : "";

const TONES = { running: "good", starting: "busy", queued: "busy", pausing: "busy", stopping: "busy", paused: "warn", succeeded: "done", failed: "bad" };

export const badge = (status) => h("span", { class: `badge ${TONES[status] ?? "off"}` }, status);

/** What the run waits for, why it failed, or nothing. */
export function waitingText(run) {
	if (run.error) return run.error.role === "preflight" ? run.error.message : `${run.error.code}: ${run.error.message}`;
	const silent = Object.entries(run.silent ?? {}).map(([role, s]) => `no ${role} worker for ${duration(s)}`);
	if (silent.length) return silent.join(", ");
	if (run.pause_reason) return `${run.status}: ${run.pause_reason}`;
	if (!run.waiting_for) return run.end_reason ?? "";
	const { name, since } = run.waiting_for;
	return since ? `${name} · ${duration(Date.now() / 1000 - unix(since))}` : name;
}
