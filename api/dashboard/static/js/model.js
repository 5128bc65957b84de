// A run's model, for export: which version, its files, the command that writes it, its card.

import { api } from "./api.js";
import { copyable, fill, h, loading, notice, pairs, ready, table, trouble } from "./dom.js";
import { bytes, count, num } from "./format.js";

const WHY = { checkpoint: "the last checkpoint", newest: "the newest version", step: "", best: "" };

/** The config of a run that starts from a version. */
const goesOn = (model) => `[model]\nname = "run:${model.run_id}@${model.step}"`;

function shown(model) {
	const scores = Object.entries(model.evals).map(([env, mean]) => [`Eval ${env}`, num(mean)]);
	const why = model.best_of === null ? WHY[model.chosen] : `the best of ${model.best_of}`;
	const step = [count(model.step), why && h("small", {}, why)];
	const rows = model.files.map((file) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, file.name)), h("td", {}, bytes(file.size)), h("td", {}, h("code", {}, file.sha256.slice(0, 16)))));
	return [
		pairs([["Step", step], ...scores, ["Size", bytes(model.size)], ["Taken from", model.kept_as === "weights" ? "the weights served" : "the checkpoint"]], "facts"),
		h("h2", {}, "Export to a folder"),
		copyable(`ratchet runs export ${model.run_id} --step ${model.step} --to ${model.run_id}-${model.step}`),
		h("h2", {}, "Start another run from it"),
		copyable(goesOn(model)),
		h("h2", {}, "Files"),
		table("Files of the model", "files", ["Name", "Size", "SHA-256"], rows),
		h("details", {}, h("summary", {}, "Model card (README.md)"), h("pre", { class: "model-card", tabindex: "0" }, model.card)),
	];
}

export function show(root, data) {
	const place = h("div", { class: "model" }, loading());
	const version = h("select", { "aria-label": "Version", onchange: () => load() }, h("option", { value: "" }, "Last checkpoint"));
	const stop = new AbortController();
	let offered = "";
	fill(root, h("div", { class: "tools" }, version), place);

	/** Offers the versions that are kept, and the best of each eval that has a result. */
	function offer(model) {
		const envs = Object.keys(data.run?.eval ?? {});
		const options = [["", "Last checkpoint"], ...envs.map((env) => [`best ${env}`, `Best of ${env}`]), ...model.steps.toReversed().map((step) => [`step ${step}`, `Step ${count(step)}`])];
		const text = JSON.stringify(options);
		if (text === offered) return;
		offered = text;
		const { value } = version;
		fill(version, options.map(([name, label]) => h("option", { value: name }, label)));
		version.value = value;
	}

	async function load() {
		const [, how, name] = /^(best|step) (.*)$/.exec(version.value) ?? [];
		const wanted = version.value;
		try {
			const model = await api.model(data.id, how ? { [how]: name } : {}, stop.signal);
			if (wanted !== version.value) return;
			offer(model);
			fill(place, shown(model));
		} catch (error) {
			if (error.name === "AbortError" || wanted !== version.value) return;
			fill(place, error.status === 404 && !how ? notice(error.title, error.message) : trouble(error));
		}
		ready("model");
	}
	load();
	return {
		onEvent: (event) => event.type === "run.checkpoint" && load(),
		destroy: () => stop.abort(),
	};
}
