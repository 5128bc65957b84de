// Several runs overlaid, and the differences of their configs.

import { diff } from "./config.js";
import { fill, h, linkTo, loading, notice, pageOf, trouble } from "./dom.js";
import { badge, num } from "./format.js";
import { keepUp } from "./live.js";
import { Metrics, runsOf } from "./metrics.js";

export function show(root, { params }) {
	const ids = [...new Set((params.get("runs") ?? "").split(",").filter(Boolean))].slice(0, 8);
	const heads = h("div", { class: "compared" });
	const place = h("section", {});
	const evals = h("section", {});
	const differences = h("section", {}, loading());
	const stop = new AbortController();
	let metrics = null;
	let live = null;
	root.append(h("div", { class: "head" }, h("h1", {}, "Compare")), heads, evals, place, h("h2", {}, "Config differences"), differences);

	const paint = (runs) =>
		fill(heads, runs.map(({ run }, i) => h("a", { class: "chip", href: pageOf(run.id), vars: { "--c": `var(--series-${i % 8})` } }, h("i", { class: "d0" }), run.id, badge(run.status), h("b", {}, num(run.reward)))));

	async function begin() {
		try {
			const runs = await runsOf(ids);
			if (runs.length < 2) {
				fill(place, notice("Nothing to compare", "Pick at least two runs in the list.", { action: linkTo("#/runs", "All runs") }));
				fill(differences);
				return;
			}
			paint(runs);
			const judge = async () => (await import("./versus.js")).versus(evals, runs.map((run) => run.id), stop.signal);
			judge();
			metrics = new Metrics(place, runs);
			metrics.load();
			live = keepUp(runs[0].id, async () => {
				await Promise.all(runs.map((run) => run.loadRun()));
				paint(runs);
				await Promise.all([metrics.update(), judge()]);
				return runs.every(({ run }) => run.finished_at) ? runs[0].run : { status: "running" };
			});
			fill(differences, await diff(runs.map((run) => run.id)).catch(trouble));
		} catch (error) {
			fill(place, trouble(error));
		}
	}
	begin();
	return {
		destroy() {
			live?.stop();
			stop.abort();
			metrics?.destroy();
		},
	};
}
