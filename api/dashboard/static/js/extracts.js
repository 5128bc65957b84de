// Derived from the data of charts: means over groups of runs, a table of evals, a download.

import { h, table } from "./dom.js";
import { count, num } from "./format.js";
import { within } from "./versus.js";

/** The value of ascending `xs`, `ys` at `x`, between neighbours; null outside, and in a gap. */
function at(xs, ys, x, from) {
	let i = from;
	while (i < xs.length && xs[i] < x) i++;
	if (i < xs.length && xs[i] === x) return [ys[i], i];
	if (i === 0 || i === xs.length) return [null, i];
	const share = (x - xs[i - 1]) / (xs[i] - xs[i - 1]);
	return [ys[i - 1] + share * (ys[i] - ys[i - 1]), i];
}

/** Points [x, y] that were measured, ascending, as columns. */
function measured([xs, ys]) {
	const some = xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => x !== null && y !== null && y !== undefined);
	some.sort((a, b) => a[0] - b[0]);
	return [some.map(([x]) => x), some.map(([, y]) => y)];
}

/**
 * Several curves [xs, ys] as one: {xs, ys, low, high}, the mean of those that reach an x, and a
 * standard deviation (of the runs themselves, n − 1) below and above it.
 */
export function pooled(curves) {
	const known = curves.map(measured).filter(([xs]) => xs.length);
	const xs = [...new Set(known.flatMap(([own]) => own))].sort((a, b) => a - b);
	const places = known.map(() => 0);
	const ys = [];
	const low = [];
	const high = [];
	for (const x of xs) {
		const values = [];
		known.forEach(([own, column], k) => {
			const [value, place] = at(own, column, x, places[k]);
			places[k] = Math.max(0, place - 1);
			if (value !== null) values.push(value);
		});
		const mean = values.reduce((a, b) => a + b, 0) / values.length;
		const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / (values.length - 1)) : 0;
		ys.push(mean);
		low.push(mean - spread);
		high.push(mean + spread);
	}
	return { xs, ys, low, high };
}

const MOST_EVALS = 200;
const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** Steps of `runs` within `range(run)` [from, to] as CSV: run, step, time, then the `keys`. */
export function csvOf(runs, keys, range) {
	const lines = [["run", "step", "time", ...keys]];
	for (const run of runs) {
		const [from, to] = range(run);
		const columns = keys.map((key) => run.table.columns.get(key) ?? []);
		run.table.steps.forEach((step, i) => {
			if (step < from || step > to) return;
			lines.push([run.id, step, run.table.times[i], ...columns.map((column) => column[i] ?? "")]);
		});
	}
	return `${lines.map((line) => line.map((value) => cell(String(value))).join(",")).join("\n")}\n`;
}

/** Downloads `text` as a file. */
export function save(text, name) {
	const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
	h("a", { href: address, download: name }).click();
	URL.revokeObjectURL(address);
}

/** Every eval of the runs, the newest first; without any, null. */
export function evalsTable(runs) {
	const many = runs.length > 1;
	const found = runs.flatMap((run) => run.evals.map((e) => [run, e]));
	if (!found.length) return null;
	found.sort(([, a], [, b]) => (b.step ?? 0) - (a.step ?? 0)).splice(MOST_EVALS);
	const rows = found.map(([run, e]) => {
		const bounded = (name) => within({ mean: e.metrics[name], low: e.metrics[`${name}/low`] ?? null, high: e.metrics[`${name}/high`] ?? null });
		const average = Object.keys(e.metrics ?? {}).filter((name) => /^(avg|pass)@\d+$/.test(name)).map((name) => `${name} ${bounded(name)}`);
		const cells = [count(e.step), e.env, num(e.reward_mean), average.join(", "), num(e.rollouts), e.errored ? h("span", { class: "wrong", title: e.error ?? "" }, num(e.errored)) : "0", e.versions ? [...new Set(e.versions)].map((v) => `v${v}`).join("–") : "–"];
		return h("tr", {}, many && h("td", {}, run.id), cells.map((value) => h("td", {}, e.problem && value === "–" ? e.problem : value)));
	});
	return table("Evals", "evals", [...(many ? ["Run"] : []), "Step", "Env", "Reward", "avg@k, pass@k", "Rollouts", "Failed", "Versions"], rows);
}
