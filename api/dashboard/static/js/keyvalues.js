// Rows of config key and value, with the schema's keys offered and its limits checked as one types.

import { fill, h } from "./dom.js";
import { leaves, mistake, put, schemaOf, valueOf } from "./schema.js";

let serial = 0;

export class KeyValues {
	constructor(label, { from = [] } = {}) {
		this.keys = new Map();
		this.rows = [];
		this.listId = `keys-${serial++}`;
		this.list = h("datalist", { id: this.listId });
		this.place = h("div", {});
		this.element = h("fieldset", { class: "keyvalues" }, h("legend", {}, label), this.list, this.place, h("button", { type: "button", class: "small", onclick: () => this.#add() }, "Add a key"));
		from.forEach((key) => this.#add(key));
	}

	/** Fetches the schema; without it keys are taken as they are typed. */
	async load() {
		this.keys = await schemaOf().then(leaves, () => new Map());
		fill(this.list, [...this.keys.keys()].map((key) => h("option", { value: key })));
	}

	#add(key = "") {
		const note = h("p", { class: "sub" });
		const name = h("input", { "aria-label": "Config key", placeholder: "trainer.optim.lr", value: key, list: this.listId });
		const value = h("input", { "aria-label": "Value", placeholder: "value" });
		const check = () => {
			const leaf = this.keys.get(name.value);
			const wrong = value.value === "" ? "" : mistake(leaf, valueOf(value.value, leaf));
			value.setCustomValidity(wrong);
			note.textContent = wrong ? `${name.value} ${wrong}` : (leaf?.description ?? "");
			note.classList.toggle("wrong", Boolean(wrong));
		};
		name.addEventListener("input", check);
		value.addEventListener("input", check);
		const row = { name, value, element: null };
		row.element = h("div", { class: "keyvalue" }, name, value, h("button", { type: "button", class: "icon small", "aria-label": "Remove key", onclick: () => (row.element.remove(), (this.rows = this.rows.filter((r) => r !== row))) }, "×"), note);
		this.rows.push(row);
		this.place.append(row.element);
		check();
	}

	/** What was filled in, as nested sections. */
	nested() {
		const data = {};
		for (const { name, value } of this.rows) {
			if (name.value && value.value !== "") put(data, name.value, valueOf(value.value, this.keys.get(name.value)));
		}
		return data;
	}
}
