// Rows of config key and value. Suggests the keys of a run's config, with their values; limits are
// checked while typing.

import { api } from "./api.js";
import { fill, h } from "./dom.js";
import { flat, leaves, mistake, put, schemaOf, textOf, valueOf } from "./schema.js";

const TEXT = { types: ["string"], choices: [] };
let serial = 0;

export class KeyValues {
	constructor(label) {
		this.offered = new Map();
		this.rows = [];
		this.list = h("datalist", { id: `keys-${serial++}` });
		this.place = h("div", {});
		this.element = h("fieldset", { class: "keyvalues" }, h("legend", {}, label), this.list, this.place, h("button", { type: "button", class: "small", onclick: () => this.add() }, "Add a key"));
	}

	/** Suggests those keys of a run's config that `admits(generic key)`. */
	async load(id, admits = () => true) {
		const [{ config }, schema] = await Promise.all([api.config(id), schemaOf().then(leaves)]);
		// A section that the run does not use has no leaves in its config; the schema knows them.
		for (const [key, leaf] of schema) if (!/\.0(\.|$)/.test(key) && admits(key)) this.offered.set(key, { leaf, path: key.split(".") });
		for (const { key, path, generic, value } of flat(config)) if (admits(generic)) this.offered.set(key, { leaf: schema.get(generic), path, value });
		fill(this.list, [...this.offered.keys()].map((key) => h("option", { value: key })));
	}

	/** A key's {leaf, path, value}. Pairs of metadata may be new. */
	#known(key) {
		const { leaf, path, value } = this.offered.get(key) ?? {};
		const [, pair] = /^metadata\.(.+)/.exec(key) ?? [];
		return { leaf: leaf ?? (pair && TEXT), path: path ?? (pair ? ["metadata", pair] : key.split(".")), value };
	}

	add(key = "") {
		const note = h("p", { class: "sub" });
		const name = h("input", { "aria-label": "Config key", placeholder: "trainer.optim.lr", value: key, list: this.list.id });
		const value = h("input", { "aria-label": "Value", placeholder: "value" });
		const check = () => {
			const { leaf } = this.#known(name.value);
			const wrong = value.value === "" ? "" : mistake(leaf, valueOf(value.value, leaf));
			value.setCustomValidity(wrong);
			note.textContent = wrong ? `${name.value} ${wrong}` : (leaf?.description ?? "");
			note.classList.toggle("wrong", Boolean(wrong));
		};
		const named = () => {
			if (this.offered.has(name.value)) value.value = textOf(this.#known(name.value).value);
			check();
		};
		name.addEventListener("input", named);
		value.addEventListener("input", check);
		const row = { name, value };
		const element = h("div", { class: "keyvalue" }, name, value, h("button", { type: "button", class: "icon small", "aria-label": "Remove key", onclick: () => (element.remove(), (this.rows = this.rows.filter((r) => r !== row))) }, "×"), note);
		this.rows.push(row);
		this.place.append(element);
		named();
	}

	/** The changes to the run's config, as nested sections. */
	nested() {
		const data = {};
		for (const { name, value } of this.rows) {
			const { leaf, path, value: present } = this.#known(name.value);
			if (name.value && value.value !== "" && value.value !== textOf(present)) put(data, path, valueOf(value.value, leaf));
		}
		return data;
	}
}
