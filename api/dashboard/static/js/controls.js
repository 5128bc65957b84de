// Controls of a run, each with a confirmation that says what will happen.

import { CONTROLS, ENDED, STATUSES } from "../contract.js";
import { api } from "./api.js";
import { ask } from "./dialog.js";
import { checkbox, h, toast } from "./dom.js";

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

// These need more than fields.
const own = (name, verb) => ({ name, ...verb, dialog: async (_, run) => (await import("./dialogs.js"))[name](run) });
const OWN = [
	own("fork", { label: "Fork", offered: STATUSES, always: true }),
	own("config", { label: "Change config", offered: STATUSES.filter((s) => s !== "stopping" && !ENDED.includes(s)), send: api.change }),
	own("note", { label: "Note", confirm: "Save the note", offered: STATUSES, always: true, send: api.note }),
];
const VERBS = [...CONTROLS.filter((verb) => !verb.danger), ...OWN, ...CONTROLS.filter((verb) => verb.danger)];

// A run that ended without a checkpoint has nothing to go on from.
const startable = (run) => run.checkpoint || !ENDED.includes(run.status);

// A run that has done all its steps can only be forked.
const possible = (verb, run) => (startable(run) || !["resume", "fork"].includes(verb.name)) && !(run.max_steps === 0 && verb.of_training) && verb.offered.includes(run.status) && (verb.always || run.status !== "succeeded" || run.max_steps === null || run.step < run.max_steps);

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

const press = (verb, run, done) => perform(verb, run, done).catch((error) => toast(error.message, "bad"));

/** Asks whether `run` should go on. */
export const resume = (run, done) => press(VERBS.find(({ name }) => name === "resume"), run, done);

/** Buttons for everything that `run` accepts in its current status. */
export function controls(run, done) {
	return VERBS.filter((verb) => possible(verb, run)).map((verb) =>
		h("button", { class: verb.danger ? "danger-quiet" : "", dataset: { verb: verb.name }, onclick: () => press(verb, run, done) }, verb.label),
	);
}
