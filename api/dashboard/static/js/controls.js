// Controls of a run, each with a confirmation that says what will happen.

import { CONTROLS, ENDED, LIVE, STATUSES } from "../contract.js";
import { api } from "./api.js";
import { ask } from "./dialog.js";
import { checkbox, h, pageOf, toast } from "./dom.js";

const live = (key) => LIVE.includes(key.replace(".0.", ".<name>.")) || key.startsWith("metadata.");

/** The dialog of a verb of the service: it asks for the fields that are sent to the run. */
async function dialogOf({ text, labels, fields }, run) {
	const names = Object.keys(fields);
	const envs = fields.envs && (await api.config(run.id)).config.eval.env.map((env) => env.name);
	const choice = (name, values, props) => h("fieldset", {}, h("legend", {}, labels[name]), values.map((value) => checkbox(props(value), labels[value] ?? value)));
	return {
		text,
		fields: names.map((name) => {
			const { type, enum: values, default: usual } = fields[name];
			if (values) return choice(name, values, (value) => ({ type: "radio", name, value, checked: value === usual }));
			if (type === "array") return choice(name, envs, (env) => ({ name: name + env, checked: true }));
			return h("label", {}, labels[name], h("input", { name, maxlength: "200" }));
		}),
		body: (given) => Object.fromEntries(names.map((name) => [name, given[name] ?? envs.filter((env) => name + env in given)]).filter(([, value]) => value.length)),
	};
}

/** Rows of config keys, used only by dialogs. */
async function keyValues(label, id, admits) {
	const { KeyValues } = await import("./keyvalues.js");
	const rows = new KeyValues(label);
	await rows.load(id, admits);
	return rows;
}

// These need more than fields.
const OWN = [
	{
		name: "fork",
		label: "Fork",
		offered: STATUSES,
		always: true,
		dialog: async (_, run) => {
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
		},
	},
	{
		name: "config",
		label: "Change config",
		send: api.change,
		offered: STATUSES.filter((s) => s !== "stopping" && !ENDED.includes(s)),
		dialog: async (_, run) => {
			const change = await keyValues("Keys to change", run.id, live);
			change.add(LIVE[0]);
			return { text: "Limits and metadata take effect at once, everything else at the next step.", fields: [change.element], body: () => change.nested() };
		},
	},
	{
		name: "note",
		label: "Note",
		confirm: "Save the note",
		offered: STATUSES,
		always: true,
		send: api.note,
		dialog: async (_, run) => {
			const { note } = await api.run(run.id);
			return {
				text: "Plain text, which everyone who sees the run can read. The run itself does not notice.",
				fields: [h("label", {}, "Note", h("textarea", { name: "note", rows: "8", maxlength: "2000", value: note }))],
				body: (given) => given,
			};
		},
	},
];
const VERBS = [...CONTROLS.filter((verb) => !verb.danger), ...OWN, ...CONTROLS.filter((verb) => verb.danger)];

// A run that has done all its steps can only be forked.
const possible = (verb, run) => !(run.max_steps === 0 && verb.of_training) && verb.offered.includes(run.status) && (verb.always || run.status !== "succeeded" || run.max_steps === null || run.step < run.max_steps);

async function perform(verb, run, done) {
	const { name, label, danger, confirm, dismiss, dialog = dialogOf, send = (sent, id, given) => api.act(sent, id, name, given) } = verb;
	const { text, fields, body, after } = await dialog(verb, run);
	const sent = new Map();
	const act = (given) => send(sent, run.id, body(given));
	const made = await ask({ title: `${label} ${run.id}`, text, fields, verb: confirm || label, dismiss, danger, act });
	if (!made) return;
	const later = Object.entries(made.pending ?? {}).map(([key, value]) => `${key} = ${JSON.stringify(value)}`);
	toast(name === "fork" ? `Forked ${run.id}` : name === "config" && later.length ? `Takes effect at the next step: ${later.join(", ")}` : `${label}: sent to ${run.id}`, "good");
	after?.(made);
	done();
}

/** Buttons for everything that `run` accepts in its current status. */
export function controls(run, done) {
	return VERBS.filter((verb) => possible(verb, run)).map((verb) =>
		h("button", { class: verb.danger ? "danger-quiet" : "", dataset: { verb: verb.name }, onclick: () => perform(verb, run, done).catch((error) => toast(error.message, "bad")) }, verb.label),
	);
}
