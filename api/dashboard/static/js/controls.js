// What can be asked of a run, each with a confirmation that says what will happen.

import { api } from "./api.js";
import { ask } from "./dialog.js";
import { h, toast } from "./dom.js";
import { KeyValues } from "./keyvalues.js";

const OVER = ["succeeded", "failed", "cancelled"];
const reasonField = () => h("label", {}, "Reason (optional)", h("input", { name: "reason", maxlength: "200" }));

async function checkpointsOf(run) {
	try {
		return (await api.checkpoints(run.id)).data.map((c) => c.step);
	} catch {
		return run.checkpoint ? [run.checkpoint.step] : [];
	}
}

const VERBS = {
	pause: {
		label: "Pause",
		when: (s) => ["queued", "starting", "running"].includes(s),
		dialog: () => ({
			text: "The run writes a checkpoint and gives back its servers. It stays paused until it is resumed.",
			fields: [
				h("fieldset", {}, h("legend", {}, "Rollouts in flight"), h("label", { class: "check" }, h("input", { type: "radio", name: "mode", value: "drain", checked: true }), "finish first"), h("label", { class: "check" }, h("input", { type: "radio", name: "mode", value: "cancel" }), "are given up and rolled out anew later")),
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
			const envs = await evalEnvs(run);
			return {
				text: "Evaluates the next policy version while training goes on.",
				fields: envs.map((env) => h("label", { class: "check" }, h("input", { type: "checkbox", name: `env:${env}`, checked: true }), env)),
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
			const steps = await checkpointsOf(run);
			const change = new KeyValues("Changed config keys (optional)");
			await change.load();
			return {
				text: "Starts another run from a checkpoint of this one. This one goes on as it is.",
				fields: [
					h("label", {}, "From checkpoint", h("select", { name: "step" }, [...steps].reverse().map((s) => h("option", { value: s }, `step ${s}`)), !steps.length && h("option", { value: "" }, "the last one"))),
					h("label", {}, "Name (optional)", h("input", { name: "name", maxlength: "40", pattern: "[a-z0-9][a-z0-9\\-]*", title: "Lower-case letters, digits and -" })),
					change.element,
				],
				body: ({ step, name }) => ({ ...(step ? { step: Number(step) } : {}), ...(name ? { name } : {}), config: change.nested() }),
				done: (made) => {
					if (made?.id && made.id !== run.id) location.hash = `#/runs/${encodeURIComponent(made.id)}`;
				},
			};
		},
	},
	config: {
		label: "Change config",
		when: (s) => !OVER.includes(s) && s !== "stopping",
		dialog: async () => {
			const change = new KeyValues("Keys to change", { from: ["dispatch.max_inflight_rollouts"] });
			await change.load();
			return {
				text: "The change holds as soon as the run has taken it up; what may change is checked by the run.",
				fields: [change.element],
				send: (run) => api.change(run.id, change.nested()),
			};
		},
	},
	stop: {
		label: "Stop",
		danger: true,
		when: (s) => !OVER.includes(s) && s !== "stopping",
		dialog: () => ({ text: "Ends the run after the step under way, with a final checkpoint. It can be resumed later.", fields: [reasonField()], body: ({ reason }) => (reason ? { reason } : {}) }),
	},
	cancel: {
		label: "Cancel",
		danger: true,
		when: (s) => !OVER.includes(s),
		dialog: () => ({ text: "Ends the run at once, without a checkpoint: the work since the last one is lost. Stop is the gentle way." }),
	},
};

async function evalEnvs(run) {
	try {
		const { config } = await api.config(run.id);
		return config.eval.env.map((env) => env.name ?? env.id);
	} catch {
		return Object.keys(run.eval);
	}
}

async function perform(verb, run, done) {
	const { label, dialog, danger } = VERBS[verb];
	const { text, fields = [], body = () => ({}), send, done: after } = await dialog(run);
	const made = await ask({
		title: `${label} ${run.id}`,
		text,
		fields,
		verb: label,
		danger,
		act: (given) => (send ? send(run) : api.act(run.id, verb, body(given))),
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
