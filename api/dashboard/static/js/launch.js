// The launch form: the keys most runs set, any other by name, or the whole config as text. The
// schema is checked as one types, everything else by the API's dry run.

import { api } from "./api.js";
import { debounced, fill, h, notice, ready, toast } from "./dom.js";
import { at, leaves, mistake, put, schemaOf, valueOf } from "./schema.js";

const COMMON = ["name", "max_steps", "seed", "model.name", "algo.type", "train.env.0.id", "train.batch_size", "train.group_size", "trainer.optim.lr", "eval.env.0.id", "eval.interval", "checkpoint.interval"];
const BASE = { name: "reverse", max_steps: 40, train: { batch_size: 64, group_size: 8, env: [{ id: "reverse-text" }] }, eval: { interval: 10, env: [{ id: "reverse-text" }] } };

export function show(root, { params }) {
	let config = structuredClone(BASE);
	let known = new Map();
	let toml = false;
	const fields = new Map();
	const text = h("textarea", { rows: "24", spellcheck: "false", "aria-label": "Config as text", oninput: () => typed() });
	const kind = h("select", { "aria-label": "Language of the text", onchange: () => ((toml = kind.value === "toml"), toml ? typed() : write()) }, h("option", { value: "json" }, "JSON"), h("option", { value: "toml" }, "TOML"));
	const form = h("div", { class: "fields" });
	const names = h("datalist", { id: "config-keys" });
	const adder = h("input", { list: "config-keys", placeholder: "Add a key, e.g. dispatch.tasks_per_minute", "aria-label": "Add a key", onchange: () => (known.has(adder.value) && (addField(adder.value), (adder.value = ""))) });
	const verdict = h("div", { class: "verdict", role: "status" });
	const launch = h("button", { class: "primary", onclick: () => start() }, "Launch");
	root.append(
		h("div", { class: "head" }, h("h1", {}, params.get("from") ? `Launch a copy of ${params.get("from")}` : "Launch a run"), launch),
		h("div", { class: "launch" }, h("section", {}, h("h2", {}, "Keys"), form, adder, names), h("section", {}, h("div", { class: "tools" }, h("h2", {}, "Config"), kind), text, verdict)),
	);

	const body = () => (toml ? [text.value, { type: "application/toml" }] : [config, {}]);

	function addField(key) {
		if (fields.has(key)) {
			fields.get(key).input.focus();
			return;
		}
		const leaf = known.get(key);
		const note = h("small", { class: "sub" });
		const choices = leaf?.types.includes("boolean") ? ["true", "false"] : (leaf?.choices ?? []);
		const closed = choices.length && (leaf.types.length < 2 || leaf.types[0] === "boolean");
		const input = closed ? h("select", {}, h("option", { value: "" }, "default"), choices.map((c) => h("option", { value: c }, String(c)))) : h("input", { placeholder: leaf?.default === undefined || leaf.default === null ? "" : JSON.stringify(leaf.default) });
		const entry = { input, note, leaf };
		input.addEventListener("input", () => {
			const value = input.value === "" ? undefined : valueOf(input.value, leaf);
			put(config, key, value);
			write();
		});
		fields.set(key, entry);
		note.id = `about-${key}`;
		input.setAttribute("aria-describedby", note.id);
		form.append(h("div", {}, h("label", {}, h("code", {}, key), input), note));
		showField(key);
	}

	/** Shows a field as the config has it, with `wrong` or what the schema has against it. */
	function showField(key, wrong = "") {
		const { input, note, leaf } = fields.get(key);
		const value = at(config, key);
		if (document.activeElement !== input) input.value = value === undefined || value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
		const why = wrong || (value === undefined ? "" : mistake(leaf, value));
		input.setAttribute("aria-invalid", String(Boolean(why)));
		note.className = why ? "wrong" : "sub";
		note.textContent = why || (leaf?.description ?? "");
		return why;
	}

	function write() {
		if (toml) return;
		text.value = JSON.stringify(config, null, 2);
		[...fields.keys()].forEach((key) => showField(key));
		check();
	}

	function typed() {
		form.inert = toml;
		if (!toml) {
			try {
				config = JSON.parse(text.value);
			} catch (error) {
				fill(verdict, h("p", { class: "wrong" }, `Not JSON: ${error.message}`));
				launch.disabled = true;
				return;
			}
			[...fields.keys()].forEach((key) => showField(key));
		}
		check();
	}

	function refused(error) {
		const elsewhere = error.errors.filter(({ key }) => !(fields.has(key) && !toml));
		error.errors.forEach(({ key, message }) => fields.has(key) && !toml && showField(key, message));
		fill(verdict, h("b", { class: "wrong" }, error.title), error.errors.length ? h("ul", {}, (elsewhere.length ? elsewhere : error.errors).map((e) => h("li", {}, e.key && h("code", {}, e.key), " ", e.message))) : h("p", {}, error.message));
	}

	const check = debounced(async () => {
		const asked = text.value;
		try {
			const answer = await api.create(...merge(true));
			if (asked !== text.value) return;
			launch.disabled = false;
			const plan = Object.entries(answer.plan ?? {}).map(([name, v]) => [name, name === "servers" ? Object.entries(v).map(([role, some]) => `${some.length} ${role}`).join(", ") : v]).filter(([, v]) => v !== null && typeof v !== "object");
			fill(verdict, h("b", { class: "fine" }, "This config can be launched."), h("dl", { class: "plan" }, plan.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value))))));
		} catch (error) {
			if (asked !== text.value) return;
			launch.disabled = true;
			refused(error);
		}
		ready("launch");
	}, 400);

	const merge = (dry) => {
		const [what, how] = body();
		return [what, { ...how, dry }];
	};

	async function start() {
		launch.disabled = true;
		try {
			const run = await api.create(...merge(false));
			toast(`Launched ${run.id}`, "good");
			location.hash = `#/runs/${encodeURIComponent(run.id)}`;
		} catch (error) {
			refused(error);
		}
		launch.disabled = false;
	}

	async function load() {
		const from = params.get("from");
		try {
			known = await schemaOf().then(leaves);
			if (from) config = (await api.config(from)).config;
		} catch (error) {
			fill(verdict, notice(error.title ?? "The form cannot be filled in", error.message, { kind: "bad" }));
		}
		fill(names, [...known.keys()].map((key) => h("option", { value: key })));
		COMMON.forEach(addField);
		write();
	}
	load();
	return {};
}
