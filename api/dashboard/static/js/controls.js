// What can be asked of a run, each with a confirmation that says what will happen.

import { api } from "./api.js";
import { ask } from "./dialog.js";
import { checkbox, h, pageOf, toast } from "./dom.js";
import { KeyValues } from "./keyvalues.js";
import { ended } from "./live.js";

// As workflows/changes.py has them.
const LIVE = ["dispatch.max_inflight_rollouts", "dispatch.tasks_per_minute", "metadata.*", "max_steps", "trainer.optim.lr", "eval.interval", "eval.env.<name>.interval", "train.env.<name>.ratio", "checkpoint.interval", "checkpoint.keep_last", "checkpoint.keep_every", "retention.weights", "retention.batches"];
const live = (key) => LIVE.includes(key.replace(".0.", ".<name>.").replace(/^metadata\..*/, "metadata.*"));

const over = (s) => ended({ status: s }) || s === "stopping";
const reasonField = () => h("label", {}, "Reason (optional)", h("input", { name: "reason", maxlength: "200" }));

const VERBS = {
	pause: {
		label: "Pause",
		when: (s) => ["queued", "starting", "running"].includes(s),
		dialog: () => ({
			text: "The run writes a checkpoint and gives back its servers. It stays paused until it is resumed.",
			fields: [
				h("fieldset", {}, h("legend", {}, "Rollouts in flight"), checkbox({ type: "radio", name: "mode", value: "drain", checked: true }, "finish first"), checkbox({ type: "radio", name: "mode", value: "cancel" }, "are given up and rolled out anew later")),
				reasonField(),
			],
			body: ({ mode, reason }) => ({ mode, reason }),
		}),
	},
	resume: {
		label: "Resume",
		when: (s, run) => ["pausing", "paused", "failed", "cancelled"].includes(s) || (s === "succeeded" && run.step < run.max_steps),
		dialog: () => ({ text: "The run goes on from its last checkpoint, on servers of its own." }),
	},
	eval: {
		label: "Evaluate",
		when: (s) => ["starting", "running"].includes(s),
		dialog: async (run) => {
			const envs = (await api.config(run.id)).config.eval.env.map((env) => env.name);
			return {
				text: "Evaluates the next policy version while training goes on.",
				fields: envs.map((env) => checkbox({ name: `env:${env}`, checked: true }, env)),
				body: (given) => {
					const chosen = envs.filter((env) => `env:${env}` in given);
					return chosen.length ? { envs: chosen } : {};
				},
			};
		},
	},
	checkpoint: {
		label: "Checkpoint",
		when: (s) => ["running"].includes(s),
		dialog: () => ({ text: "Writes a checkpoint after the step under way." }),
	},
	fork: {
		label: "Fork",
		when: () => true,
		dialog: async (run) => {
			const { data } = await api.checkpoints(run.id);
			const change = new KeyValues("Changed config keys (optional)");
			await change.load(run.id);
			return {
				text: "Starts another run from a checkpoint of this one. This one goes on as it is.",
				fields: [
					h("label", {}, "From checkpoint", h("select", { name: "step" }, data.reverse().map((c) => h("option", { value: c.step, disabled: !c.sound }, `step ${c.step}`, !c.sound && ` (damaged: ${c.problem})`)), !data.length && h("option", { value: "" }, "the last one"))),
					h("label", {}, "Name (optional)", h("input", { name: "name", maxlength: "40", pattern: "[a-z0-9][a-z0-9\\-]*", title: "Lower-case letters, digits and -" })),
					change.element,
				],
				body: ({ step, name }) => ({ ...(step ? { step: Number(step) } : {}), ...(name ? { name } : {}), config: change.nested() }),
				done: (made) => {
					if (made?.id && made.id !== run.id) location.hash = pageOf(made.id);
				},
			};
		},
	},
	config: {
		label: "Change config",
		when: (s) => !over(s),
		dialog: async (run) => {
			const change = new KeyValues("Keys to change");
			await change.load(run.id, live);
			change.add(LIVE[0]);
			return {
				text: "Limits and metadata hold at once, all else from the next step on.",
				fields: [change.element],
				body: () => change.nested(),
			};
		},
	},
	stop: {
		label: "Stop",
		danger: true,
		when: (s) => !over(s),
		dialog: () => ({ text: "Ends the run after the step under way, with a final checkpoint. It can be resumed later.", fields: [reasonField()], body: ({ reason }) => (reason ? { reason } : {}) }),
	},
	cancel: {
		label: "Cancel",
		danger: true,
		when: (s) => !ended({ status: s }),
		dialog: () => ({ text: "Ends the run at once, without a checkpoint: the work since the last one is lost. Stop is the gentle way." }),
	},
};

async function perform(verb, run, done) {
	const { label, dialog, danger } = VERBS[verb];
	const { text, fields, body = () => ({}), done: after } = await dialog(run);
	const sent = new Map();
	const made = await ask({
		title: `${label} ${run.id}`,
		text,
		fields,
		verb: label,
		danger,
		act: (given) => (verb === "config" ? api.change(sent, run.id, body(given)) : api.act(sent, run.id, verb, body(given))),
	});
	if (!made) return;
	toast(verb === "fork" ? `Forked ${run.id}` : `${label}: ${run.id} was told`, "good");
	after?.(made);
	done();
}

/** Buttons of all that may be asked of `run` as it is. */
export function controls(run, done) {
	return Object.entries(VERBS)
		.filter(([, { when }]) => when(run.status, run))
		.map(([verb, { label, danger }]) =>
			h("button", { class: danger ? "danger-quiet" : "", dataset: { verb }, onclick: () => perform(verb, run, done).catch((error) => toast(error.message, "bad")) }, label),
		);
}
