// A sequence of tokens, coloured by a value of each; and a conversation turn by turn.

import { h, pairs } from "./dom.js";
import { num } from "./format.js";

const FIRST = 1500;
const two = (value, most) => ({ tone: value < 0 ? "minus" : "plus", share: Math.abs(value) / (most || 1) });
const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 0);
const differences = (s) => s.trainer_logprobs?.map((p, i) => (s.loss_mask[i] && p !== null ? p - s.logprobs[i] : 0));

export const MODES = {
	advantage: { label: "Advantage", note: "Blue tokens are made more likely, orange ones less. Grey text was not sampled by the policy.", values: (s) => s.advantages, tone: two },
	logprob: { label: "Log-probability", note: "The stronger the colour, the less likely the token was to the engine that sampled it.", values: (s) => s.logprobs, tone: (v) => ({ tone: "minus", share: Math.min(1, -v / 5) }) },
	mismatch: { label: "Trainer / engine mismatch", note: "How far the trainer's log-probability is above (blue) or below (orange) the engine's.", values: differences, tone: two },
	version: { label: "Policy version", note: "One colour for each policy version that sampled tokens.", values: (s) => s.versions, tone: (v) => ({ series: ((v % 8) + 8) % 8, share: 0.8 }) },
};

/** The largest value of `mode` at any sampled token of `samples`, which is drawn in full colour. */
export const scaleOf = (samples, mode) => largest(samples.map((s) => largest((MODES[mode].values(s) ?? []).filter((_, i) => s.loss_mask[i]))));

/** `text` with visible spaces, tabs and newlines. */
export const marked = (text) => text.replaceAll(" ", "·").replaceAll("\t", "→\t").replaceAll("\r", "␍").replaceAll("\n", "↵\n");

/**
 * The tokens of `sample` coloured by `mode`, each as `look` shows its text; those that the policy
 * did not sample are grey.
 */
export function strip(sample, mode, most, look = String) {
	const { values: of, tone } = MODES[mode];
	const values = of(sample);
	const parts = (from, to) =>
		sample.token_ids.slice(from, to).map((id, k) => {
			const i = from + k;
			const piece = sample.pieces?.[i] ?? `${id} `;
			const text = sample.pieces ? look(piece) : piece;
			const token = `${JSON.stringify(piece)} · id ${id}`;
			if (!sample.loss_mask[i]) return h("span", { class: "given", title: token }, text);
			const { tone: name, series, share } = values ? tone(values[i], most) : { share: 0 };
			const ground = series === undefined ? `var(--${name ?? "plus"})` : `var(--series-${series})`;
			const begins = i > 0 && !sample.loss_mask[i - 1];
			const title = `${token} · logprob ${num(sample.logprobs[i])} · advantage ${num(sample.advantages?.[i])} · version ${sample.versions[i]}`;
			return h("span", { class: begins ? "token begins" : "token", title, vars: { "--tone": ground, "--share": `${Math.round(share * 45)}%` } }, text);
		});
	const place = h("div", { class: "strip", tabindex: "0", role: "region", "aria-label": "Tokens" }, parts(0, FIRST));
	const rest = sample.token_ids.length - FIRST;
	if (rest > 0) {
		const more = h("button", { class: "small", onclick: () => more.replaceWith(...parts(FIRST)) }, `${rest} more tokens`);
		place.append(more);
	}
	return [values ? null : h("p", { class: "sub" }, mode === "mismatch" ? "The trainer's log-probabilities of these tokens are not kept: no step has trained on them yet, or retention.batches has removed them. The panel Mismatch KL has their mean." : "Not kept for this rollout."), place];
}

const said = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));

/** The messages, each text as `look` shows it, and the rewards. */
export function turns(rollout, look = String) {
	let turn = 0;
	const plain = rollout.samples.map((s) => h("div", { class: "message sampled" }, h("small", {}, `sampled · ${s.token_ids.length} tokens`), h("pre", {}, look(s.pieces ? s.pieces.join("") : s.token_ids.join(" ")))));
	return h(
		"div",
		{ class: "turns" },
		rollout.messages.length ? null : plain,
		rollout.messages.map((m) => {
			if (m.sampled) turn++;
			return h("div", { class: m.sampled ? "message sampled" : "message" }, h("small", {}, m.sampled ? `${m.role} · turn ${turn}` : m.role, m.tokens ? ` · ${m.tokens} tokens` : ""), h("pre", {}, look(said(m.content ?? "")), m.tool_calls ? `\n${said(m.tool_calls)}` : ""));
		}),
		pairs([...Object.entries(rollout.rewards), ...Object.entries(rollout.metrics)].map(([name, value]) => [name, num(value)])),
	);
}
