// Dialogs of the controls that need more than fields, loaded when one of them opens.

import { LIVE } from "../contract.js";
import { api } from "./api.js";
import { h, pageOf } from "./dom.js";
import { KeyValues } from "./keyvalues.js";

const live = (key) => LIVE.includes(key.replace(".0.", ".<name>.")) || key.startsWith("metadata.");

/** Rows of config keys. */
async function keyValues(label, id, admits) {
	const rows = new KeyValues(label);
	await rows.load(id, admits);
	return rows;
}

export async function fork(run) {
	const { data } = await api.checkpoints(run.id);
	const change = await keyValues("Changed config keys (optional)", run.id);
	return {
		text: "Starts a new run from a checkpoint of this one. This run continues unchanged.",
		fields: [
			h("label", {}, "From checkpoint", h("select", { name: "step" }, data.reverse().map((c) => h("option", { value: c.step, disabled: !c.sound }, `step ${c.step}`, !c.sound && ` (damaged: ${c.problem})`)), !data.length && h("option", { value: "" }, "the last one"))),
			h("label", {}, "Name (optional)", h("input", { name: "name", maxlength: "40", pattern: "[a-z0-9][a-z0-9\\-]*", title: "Lower-case letters, digits and -" })),
			change.element,
		],
		body: ({ step, name }) => ({ ...(step ? { step: Number(step) } : {}), ...(name ? { name } : {}), config: change.nested() }),
		after: ({ id }) => (location.hash = pageOf(id)),
	};
}

export async function config(run) {
	const change = await keyValues("Keys to change", run.id, live);
	change.add(LIVE[0]);
	return { text: "Limits and metadata take effect at once, everything else at the next step.", fields: [change.element], body: () => change.nested() };
}

export async function note(run) {
	const { note } = await api.run(run.id);
	return {
		text: "Plain text, which everyone who sees the run can read. The run itself does not notice.",
		fields: [h("label", {}, "Note", h("textarea", { name: "note", rows: "8", maxlength: "2000", value: note }))],
		body: (given) => given,
	};
}
