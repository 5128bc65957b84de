// Evals of runs against the first one's, pairwise on the same examples.

import { api } from "./api.js";
import { fill, h, pageOf, table, trouble } from "./dom.js";
import { num } from "./format.js";

/** What the interval of a difference says. */
const verdict = ({ low, high }) => (low === null ? "no interval" : low > 0 ? "better" : high < 0 ? "worse" : "no clear difference");

/** '0.61 [0.52, 0.7]': a mean with its 95 % confidence interval, where that is known. */
export const within = (value) => (value === null ? "–" : `${num(value.mean)}${value.low === null ? "" : ` [${num(value.low)}, ${num(value.high)}]`}`);

const rollouts = (side, ids, score) => h("a", { href: pageOf(side.run_id, `rollouts?kind=eval&r=${encodeURIComponent(ids[0])}`) }, num(score));

function differing(found) {
	if (!found.differ.length) return null;
	const rows = found.differ.map((each) => h("tr", {}, h("th", { scope: "row" }, each.example), h("td", {}, rollouts(found.this, each.rollouts, each.score)), h("td", {}, rollouts(found.other, each.other_rollouts, each.other_score))));
	return h("details", {}, h("summary", {}, `${found.env}: examples of ${found.this.run_id} and ${found.other.run_id} that differ`), table(`Examples that differ in ${found.env}`, "differ", ["Example", found.this.run_id, found.other.run_id], rows));
}

const row = (found, run, base) =>
	found.problem
		? h("tr", {}, h("th", { scope: "row" }, found.env), h("td", {}, run), h("td", { colspan: 5 }, h("span", { class: "sub" }, `Not compared with ${base}: ${found.problem}.`)))
		: h("tr", {}, h("th", { scope: "row" }, found.env), [run, found.metric, within(found.this.score), within(found.other.score), h("span", {}, within(found.difference), " ", h("small", { class: "sub" }, verdict(found.difference))), `${found.wins} / ${found.losses} / ${found.ties}`].map((value) => h("td", {}, value)));

/** Fills `place` with a table of the evals of `ids` against those of the first of them. */
export async function versus(place, [base, ...ids], signal) {
	try {
		const found = await Promise.all(ids.map(async (id) => [id, (await api.compareEvals(id, base, signal)).data]));
		const text = JSON.stringify(found);
		// What the reader has unfolded stays so.
		if (text === place.dataset.shown) return;
		place.dataset.shown = text;
		const all = found.flatMap(([id, data]) => data.map((each) => [each, id]));
		if (!all.length) {
			fill(place);
			return;
		}
		fill(
			place,
			h("h2", {}, "Evals on the same examples"),
			h("p", { class: "sub" }, `Against ${base}: means over examples, differences paired by example, 95 % confidence intervals.`),
			table("Evals on the same examples", "evals", ["Env", "Run", "Measure", "Score", base, "Difference", "Wins / losses / ties"], all.map(([each, id]) => row(each, id, base))),
			all.map(([each]) => differing(each)),
		);
	} catch (error) {
		if (error.name !== "AbortError") fill(place, trouble(error));
	}
}
