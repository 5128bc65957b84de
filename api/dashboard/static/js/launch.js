// The launch form: the keys most runs set, any other by name, or the whole config as text. The
// schema is checked while typing, everything else by the API's dry run, and finally by workers.

import { api } from "./api.js";
import { debounced, fill, h, pageOf, pairs, ready, refusal, toast, trouble } from "./dom.js";
import { at, leaves, mistake, put, schemaOf, textOf, valueOf } from "./schema.js";

const COMMON = ["name", "max_steps", "seed", "model.name", "algo.type", "train.env.0.id", "train.batch_size", "train.group_size", "trainer.optim.lr", "eval.env.0.id", "eval.interval", "checkpoint.interval"];
const BASE = { name: "reverse", max_steps: 40, train: { batch_size: 64, group_size: 8, env: [{ id: "reverse-text" }] }, trainer: { optim: { lr: 1.2e-3 } }, eval: { interval: 10, env: [{ id: "reverse-text" }] } };

/** Pauses in typing after which the API reads the text, and after which workers check it. */
const READ_MS = 400;
const PAUSE_MS = 1500;

/** A value as the API reads it in TOML, which has no null. */
const spelled = (value) => (Array.isArray(value) ? value.map(spelled) : value === null ? "<none>" : typeof value === "string" && /^\\*<none>$/.test(value) ? `\\${value}` : value);

/** A config as TOML: the values of a section, then the sections in it; no value that is the default is written as none. */
function tomlOf(data, known, above = [], generic = []) {
	const entries = Object.entries(data).filter(([key, value]) => value !== null || known.get([...generic, key].join("."))?.default !== null);
	const inner = (value) => value !== null && typeof value === "object" && (!Array.isArray(value) || typeof value[0] === "object");
	const name = (path) => path.map((part) => (/^[\w-]+$/.test(part) ? part : JSON.stringify(part))).join(".");
	const sections = entries.filter(([, value]) => inner(value)).flatMap(([key, value]) => {
		const path = [...above, key];
		const below = [...generic, key];
		return Array.isArray(value) ? value.map((one) => `\n[[${name(path)}]]\n${tomlOf(one, known, path, [...below, "0"])}`) : `\n[${name(path)}]\n${tomlOf(value, known, path, below)}`;
	});
	return [...entries.filter(([, value]) => !inner(value)).map(([key, value]) => `${name([key])} = ${JSON.stringify(spelled(value))}\n`), ...sections].join("");
}

export function show(root, { params }) {
	const sent = new Map();
	let config = structuredClone(BASE);
	let known = new Map();
	let toml = false;
	let preflight = null;
	const fields = new Map();
	const text = h("textarea", { rows: "24", spellcheck: "false", "aria-label": "Config as text", oninput: () => typed() });
	const kind = h("select", { "aria-label": "Language of the text", onchange: () => translate() }, h("option", { value: "json" }, "JSON"), h("option", { value: "toml" }, "TOML"));
	const form = h("div", { class: "fields" });
	const names = h("datalist", { id: "config-keys" });
	const adder = h("input", { list: "config-keys", placeholder: "Add a key, e.g. dispatch.tasks_per_minute", "aria-label": "Add a key", onchange: () => (known.has(adder.value) && (addField(adder.value), (adder.value = ""))) });
	const verdict = h("div", { class: "verdict", role: "status" });
	const launch = h("button", { class: "primary", onclick: () => start() }, "Launch");
	const aside = h("p", { class: "sub", hidden: true }, "The fields read and write JSON: switch back to it, or set keys in the text.");
	root.append(
		h("div", { class: "head" }, h("h1", {}, params.get("from") ? `Launch a copy of ${params.get("from")}` : "Launch a run"), launch),
		h("div", { class: "launch" }, h("section", {}, h("h2", {}, "Keys"), aside, form, adder, names), h("section", {}, h("div", { class: "tools" }, h("h2", {}, "Config"), kind), text, verdict)),
	);

	const body = () => (toml ? [text.value, "application/toml"] : [config]);

	/** Translates the text into the other language; TOML is read by the API, which adds defaults. */
	async function translate() {
		kind.value = toml ? "toml" : "json";
		try {
			if (!toml) {
				text.value = tomlOf(JSON.parse(text.value), known);
				toml = true;
				kind.value = "toml";
				return typed();
			}
			if (text.value !== tomlOf(config, known)) config = (await api.check(...body())).config;
			toml = false;
			kind.value = "json";
			shape();
			write();
		} catch (error) {
			if (toml) refused(error);
		}
	}

	/** Shows the fields with JSON alone, which they read and write. */
	function shape() {
		form.hidden = adder.hidden = toml;
		aside.hidden = !toml;
	}

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
			put(config, key.split("."), value);
			write();
		});
		fields.set(key, entry);
		note.id = `about-${key}`;
		input.setAttribute("aria-describedby", note.id);
		form.append(h("div", {}, h("label", {}, h("code", {}, key), input), note));
		showField(key);
	}

	/** Shows a field's value in the config, with `wrong` or the schema's objection. */
	function showField(key, wrong = "") {
		const { input, note, leaf } = fields.get(key);
		const value = at(config, key);
		if (document.activeElement !== input) input.value = value === null ? "none" : textOf(value);
		const why = wrong || (value === undefined ? "" : mistake(leaf, value));
		input.setAttribute("aria-invalid", Boolean(why));
		note.className = why ? "wrong" : "sub";
		note.textContent = why || (leaf?.description ?? "");
		return why;
	}

	/** Drops pending requests, which are about an earlier text. */
	function forget() {
		check.cancel();
		preflight?.abort();
	}

	function write() {
		forget();
		if (toml) return;
		text.value = JSON.stringify(config, null, 2);
		[...fields.keys()].forEach((key) => showField(key));
		check();
	}

	function typed() {
		forget();
		shape();
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
		const { errors = [] } = error;
		const elsewhere = errors.filter(({ key }) => !(fields.has(key) && !toml));
		errors.forEach(({ key, message }) => fields.has(key) && !toml && showField(key, message));
		fill(verdict, refusal({ title: error.title, errors: elsewhere.length ? elsewhere : errors, message: error.message }));
	}

	/** The plan of a valid config; `note` says how far it was checked. */
	function planned({ plan = {}, estimates = {} }, note) {
		const taken = Object.entries(estimates).map(([what, parts]) => [what, `${(Object.values(parts).reduce((sum, size) => sum + size, 0) / 2 ** 30).toFixed(2)} GiB`]);
		const rows = Object.entries(plan).map(([name, v]) => [name, name === "servers" ? Object.entries(v).map(([role, some]) => `${some.length} ${role}`).join(", ") : v]).filter(([, v]) => v !== null && typeof v !== "object");
		fill(verdict, note, pairs([...rows.map(([name, value]) => [name.replaceAll("_", " "), value]), ...taken], "plan"));
	}

	/** Schedules a reading of the text; workers check it once it is valid and typing has stopped. */
	const check = debounced(async () => {
		const asked = text.value;
		const { signal } = (preflight = new AbortController());
		const [content, type] = body();
		const stale = () => signal.aborted || asked !== text.value;
		try {
			const read = await api.check(content, type, { signal });
			if (stale()) return;
			planned(read, h("p", {}, "The config's keys are valid; workers now check its environments and model, which takes some 10 to 20 seconds, up to a minute on a busy machine…"));
			launch.disabled = false;
			ready("launch");
			await new Promise((done) => setTimeout(done, PAUSE_MS - READ_MS));
			if (stale()) return;
			const answer = await api.check(content, type, { preflight: true, signal });
			if (stale()) return;
			planned(answer, answer.unchecked ? h("p", {}, h("b", {}, "The config is valid. Not checked: "), `${answer.unchecked}.`) : h("p", {}, h("b", { class: "fine" }, "This config can be launched."), " Workers have checked it."));
		} catch (error) {
			if (stale()) return;
			launch.disabled = true;
			refused(error);
			ready("launch");
		}
	}, READ_MS);

	async function start() {
		const asked = text.value;
		launch.disabled = true;
		try {
			const run = await api.create(sent, ...body());
			toast(`Launched ${run.id}`, "good");
			location.hash = pageOf(run.id);
		} catch (error) {
			refused(error);
		}
		if (asked === text.value) launch.disabled = false;
	}

	async function load() {
		const from = params.get("from");
		try {
			known = await schemaOf().then(leaves);
			if (from) config = (await api.config(from)).config;
		} catch (error) {
			fill(verdict, trouble(error));
		}
		fill(names, [...known.keys()].map((key) => h("option", { value: key })));
		COMMON.forEach(addField);
		write();
	}
	load();
	return { destroy: forget };
}
