// A run's page: its state, its controls, and the tabs below.

import { controls, resume } from "./controls.js";
import { otherRuns, RunData } from "./data.js";
import { ask } from "./dialog.js";
import { checkbox, fill, h, linkTo, notice, pageOf, pairs, trouble } from "./dom.js";
import { badge, count, duration, num, unix, waitingText } from "./format.js";
import { healthLine } from "./health.js";
import { bindKeys } from "./keyboard.js";
import { ended, keepUp } from "./live.js";
import { stopped, Warnings } from "./warnings.js";

const TABS = { metrics: "Metrics", timeline: "Timeline", rollouts: "Rollouts", events: "Events", config: "Config", model: "Model" };

const LOADERS = {
	metrics: () => import("./metrics.js"),
	timeline: () => import("./timeline.js"),
	rollouts: () => import("./rollouts.js"),
	events: () => import("./events.js"),
	config: () => import("./config.js"),
	model: () => import("./model.js"),
};

const fact = (name, value, sub) => [name, [value, sub && h("small", {}, sub)]];

function facts(run) {
	const began = unix(run.started_at ?? run.created_at);
	const till = unix(run.finished_at) ?? Date.now() / 1000;
	// What a paused run reported last holds no more.
	const goes = !ended(run) && !["paused", "queued"].includes(run.status);
	const flying = goes && run.progress ? run.progress.rollouts_inflight_train + run.progress.rollouts_inflight_eval : null;
	const restarts = Object.entries(run.restarts).filter(([, n]) => n > 0);
	const trained = [
		fact("Step", count(run.step), run.max_steps ? `of ${count(run.max_steps)}` : "until it is stopped"),
		fact("Reward", num(run.reward)),
	];
	return [
		...(run.kind === "eval" ? [fact("Evaluates", run.model)] : trained),
		...Object.entries(run.eval).map(([env, e]) => fact(`Eval ${env}`, num(e.reward), `step ${count(e.step)}${e.failed ? `, ${e.failed} of ${e.of} failed` : ""}`)),
		fact("Policy", run.policy_version === null ? "–" : `v${run.policy_version}`),
		fact("In flight", num(flying), goes && run.progress?.permits ? `of ${run.progress.permits}` : ""),
		fact("Sampled", flying === null ? "–" : num(run.progress.tokens_per_s), flying === null ? "" : "tokens/s"),
		run.kind === "train" && fact("Checkpoint", run.checkpoint ? `step ${count(run.checkpoint.step)}` : "–"),
		fact("Restarts", restarts.length ? restarts.map(([role, n]) => `${role} ${n}`).join(", ") : "0"),
		fact(ended(run) ? "Took" : "Runs for", duration(till - began)),
	].filter(Boolean);
}

export function show(root, asked) {
	const data = new RunData(asked.id);
	const [title, tools, summary] = ["title", "tools", ""].map((kind) => h("div", { class: kind }));
	const stop = new AbortController();
	const health = healthLine(asked.id, stop.signal, () => resume(data.run, () => live.refresh()));
	const warnings = new Warnings(asked.id, stop.signal);
	const header = h("div", { class: "run-head" }, h("div", { class: "head" }, title, tools), health.element, summary);
	const tabs = h("nav", { class: "tabs", "aria-label": "Run" });
	const place = h("section", { class: "tab", "aria-live": "off" });
	const alarm = h("div", {});
	root.append(header, alarm, tabs, place);
	document.title = `${asked.id} · Ratchet`;

	let view = null;
	let tab = null;
	let asks = null;
	let painted = "";
	let offered = "";
	let failed = false;

	async function overlay() {
		const others = await otherRuns(data.id);
		if (!others.length) {
			await ask({ title: "Nothing to compare with", text: "This is the only run so far.", verb: null });
			return;
		}
		const boxes = others.map((run) => checkbox({ name: run.id }, run.id, " ", badge(run.status)));
		const answers = await ask({ title: "Lay other runs over this one", fields: [h("div", { class: "list" }, boxes)], verb: "Compare" });
		const ids = Object.keys(answers ?? {});
		if (ids.length) location.hash = `#/compare?runs=${[data.id, ...ids].map(encodeURIComponent).join(",")}`;
	}

	function paint(run) {
		const text = JSON.stringify([run, warnings.known.size, run.waiting_for && Math.floor(Date.now() / 2000)]);
		if (text === painted) return;
		painted = text;
		const buttons = controls(run, () => live.refresh());
		const offers = String(buttons.map((b) => b.dataset.verb));
		// A button that is pressed must stay.
		if (offers !== offered) {
			offered = offers;
			const focused = document.activeElement.dataset.verb;
			fill(
				tools,
				buttons,
				h("button", { dataset: { verb: "compare" }, onclick: overlay }, "Compare"),
				run.links.temporal_ui && h("a", { class: "button", href: run.links.temporal_ui, target: "_blank", rel: "noopener" }, "Temporal ↗"),
			);
			tools.querySelector(`[data-verb="${focused}"]`)?.focus();
		}
		const share = run.max_steps ? Math.min(1, run.step / run.max_steps) : 0;
		const from = run.lineage?.source ?? run.forked_from ?? null;
		fill(title, h("h1", {}, run.id), badge(run.status), h("span", { class: "sub waiting" }, stopped(run) || ended(run) ? "" : waitingText(run)));
		fill(
			summary,
			run.max_steps > 0 && h("progress", { max: 1, value: share, "aria-label": "Steps done" }),
			warnings.shown(run),
			run.note && h("p", { class: "run-note", role: "note", "aria-label": "Note" }, run.note),
			pairs(facts(run), "facts"),
			h("div", { class: "tags" }, Object.entries(run.metadata).map(([k, v]) => h("span", { class: "tag" }, `${k}: ${v}`)), from && h("span", { class: "tag" }, "from ", h("a", { href: pageOf(from.replace(/\+\d+$/, "")) }, from))),
		);
	}

	async function open(name, params) {
		asks = params;
		if (tab === name) {
			view?.navigate?.(params);
			return;
		}
		tab = name;
		view?.destroy?.();
		view = null;
		delete document.documentElement.dataset.ready;
		fill(tabs, Object.entries(TABS).map(([key, label]) => h("a", { href: pageOf(data.id, key), "aria-current": key === name ? "page" : null }, label)));
		tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
		fill(place);
		const load = LOADERS[name];
		if (!load) {
			fill(place, notice("No such tab", "This address does not name a tab of a run."));
			return;
		}
		const module = await load();
		if (tab === name) view = module.show(place, data, params);
	}

	const unbind = bindKeys(Object.fromEntries(Object.entries(TABS).map(([key, label], i) => [String(i + 1), [`${label} of the run`, () => (location.hash = pageOf(data.id, key))]])));

	const live = keepUp(
		data.id,
		async () => {
			try {
				const run = await data.loadRun();
				warnings.load().then(() => paint(data.run));
				paint(run);
				health.update(run);
				if (failed) fill(alarm);
				failed = false;
				if (tab === null) open(asked.tab, asked.params);
				await view?.update?.();
				return run;
			} catch (error) {
				if (error.name !== "AbortError") {
					failed = true;
					fill(alarm, trouble(error, error.status === 404 && linkTo("#/runs", "All runs")));
					if (error.status === 404 && !data.run) {
						// Its module may still be on the way.
						tab = null;
						view?.destroy?.();
						view = null;
						fill(tabs);
						fill(place);
					}
				}
				throw error;
			}
		},
		(event) => {
			warnings.onEvent(event);
			view?.onEvent?.(event);
		},
		() => {
			const name = tab;
			if (name === null) return;
			tab = null;
			open(name, asks);
		},
	);
	open(asked.tab, asked.params);
	return {
		navigate: (next) => open(next.tab, next.params),
		destroy() {
			live.stop();
			stop.abort();
			unbind();
			view?.destroy?.();
			document.title = "Ratchet";
		},
	};
}
