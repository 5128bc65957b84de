// The list of runs: state, progress, reward as a sparkline; filters; runs picked for comparison.

import { STATUSES } from "../contract.js";
import { api } from "./api.js";
import { debounced, fill, h, linkTo, loading, notice, pageOf, ready, searchField, svg, table, trouble } from "./dom.js";
import { ago, badge, bytes, count, damageLine, duration, num, unix, waitingText } from "./format.js";
import { bindKeys } from "./keyboard.js";
import { showLink } from "./live.js";

const POLL_MS = 3000;
const PAGE = 50;
const MOST = 100;
const MOST_PAGES = 20;
/** The warning about a process of the local stack that keeps ending. */
const looping = (s) => h("p", { class: "wrong" }, `${s.name} is crash-looping: it ended ${s.ends} times in a row. It is restarted each time; ${s.log} below RATCHET_HOME says why.`);
const startCommand = () => `curl -sS ${location.host}/v1/runs -H 'content-type: application/toml' --data-binary @configs/examples/reverse_text.toml`;

/** A line of `values`, or nothing for fewer than two. */
function sparkline(values) {
	const some = values.filter((v) => v !== null && v !== undefined);
	const element = svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" });
	if (some.length < 2) return element;
	const low = Math.min(...some);
	const width = Math.max(...some) - low || 1;
	const points = some.map((v, i) => `${((100 * i) / (some.length - 1)).toFixed(1)},${(26 - (24 * (v - low)) / width).toFixed(1)}`);
	element.append(svg("polyline", { points: points.join(" "), fill: "none", "vector-effect": "non-scaling-stroke" }));
	return element;
}

export function show(root, { params }) {
	const stop = new AbortController();
	const rows = new Map();
	const sparks = new Map();
	const picked = new Set();
	let pages = 1;
	let all = [];

	const search = searchField("Filter by name or metadata", () => (paint(), look()), { value: params.get("q") ?? "" });
	const status = h("select", { "aria-label": "Status", onchange: () => refresh() }, h("option", { value: "" }, "Any status"), STATUSES.map((s) => h("option", { value: s, selected: params.get("status") === s }, s)));
	const compare = h("button", { disabled: true, onclick: () => (location.hash = `#/compare?runs=${[...picked].join(",")}`) }, "Compare");
	const scroll = table("Runs", "runs", [h("span", { class: "sr" }, "Compare"), "Run", "Status", "Step", "Reward", "Reward over steps", "Eval", "Created"], []);
	const body = scroll.querySelector("tbody");
	const state = h("div", {}, loading());
	const services = h("div", { class: "services", role: "alert" });
	const more = h("button", { hidden: true, onclick: () => (pages++, refresh()) }, "Older runs");
	root.append(
		h("div", { class: "head" }, h("h1", {}, "Runs"), h("div", { class: "tools" }, search, status, compare, linkTo("#/launch", "Launch a run", "primary"))),
		services,
		state,
		scroll,
		more,
	);
	scroll.hidden = true;
	const unbind = bindKeys({ "/": ["Filter", () => search.focus()] });

	function pick(id, on) {
		if (on) picked.add(id);
		else picked.delete(id);
		compare.disabled = picked.size < 2;
		compare.textContent = picked.size ? `Compare ${picked.size}` : "Compare";
	}

	/** Sparklines take a request each: fetched once per step, and for ended runs once. */
	async function drawSpark(run, cell) {
		const known = sparks.get(run.id);
		if (known?.step === run.step || !run.step) return;
		sparks.set(run.id, { step: run.step });
		try {
			const page = await api.metrics(run.id, { keys: ["reward/all/mean"], points: 60 }, stop.signal);
			const damage = damageLine("steps", page.damaged);
			fill(cell, sparkline(page.data.map((r) => r.metrics["reward/all/mean"])), damage && h("div", { class: "sub wrong", title: damage }, damage));
		} catch {
			sparks.delete(run.id);
		}
	}

	function row(run) {
		let entry = rows.get(run.id);
		if (!entry) {
			const spark = h("td", { class: "sparks" });
			const cells = Array.from({ length: 7 }, () => h("td", {}));
			const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, onchange: (e) => pick(run.id, e.target.checked) });
			fill(cells[0], box);
			// A link that is pressed, or has the focus, must stay.
			const tags = h("div", { class: "tags" });
			const about = h("div", { class: "sub" });
			fill(cells[1], h("a", { class: "run-name", href: pageOf(run.id) }, run.id), about, tags);
			entry = { element: h("tr", {}, cells.slice(0, 5), spark, cells.slice(5)), cells, about, tags, spark };
			rows.set(run.id, entry);
		}
		const text = JSON.stringify(run);
		if (entry.text === text) return entry.element;
		entry.text = text;
		const [, , state, steps, reward, evals, created] = entry.cells;
		fill(entry.tags, Object.entries(run.metadata).map(([k, v]) => h("span", { class: "tag" }, `${k}: ${v}`)));
		fill(entry.about, [run.envs.join(" + "), run.model].filter(Boolean).join(" · "));
		fill(state, badge(run.status), h("div", { class: run.error ? "sub why" : "sub" }, waitingText(run)));
		const share = run.max_steps ? run.step / run.max_steps : 0;
		fill(steps, h("div", {}, run.kind === "eval" ? "eval" : count(run.step), run.max_steps ? h("span", { class: "sub" }, ` / ${count(run.max_steps)}`) : null), run.max_steps ? h("progress", { max: 1, value: Math.min(1, share), "aria-label": `Steps of ${run.id}` }) : null);
		reward.className = evals.className = "n";
		fill(reward, num(run.reward));
		fill(evals, Object.entries(run.eval).map(([env, e]) => h("div", { title: env }, num(e.reward))));
		const took = run.started_at && duration((unix(run.finished_at) ?? Date.now() / 1000) - unix(run.started_at));
		const more = [took && `${run.finished_at ? "took" : "for"} ${took}`, run.disk && bytes(run.disk)].filter(Boolean).join(" · ");
		fill(created, h("time", { datetime: run.created_at, title: run.created_at }, ago(run.created_at)), h("div", { class: "sub" }, more));
		drawSpark(run, entry.spark);
		return entry.element;
	}

	function paint() {
		const wanted = search.value.toLowerCase();
		const shown = all.filter((run) => !wanted || `${run.id} ${run.name} ${Object.entries(run.metadata).flat().join(" ")}`.toLowerCase().includes(wanted));
		scroll.hidden = !shown.length;
		const elements = shown.map(row);
		elements.forEach((element, i) => body.children[i] === element || body.insertBefore(element, body.children[i]));
		while (body.children.length > elements.length) body.lastChild.remove();
		if (shown.length) fill(state);
		else if (all.length || status.value) fill(state, notice("No run matches the filters", "Change the text or the status.", { action: h("button", { onclick: () => ((search.value = status.value = ""), refresh()) }, "Show all") }));
		else fill(state, notice("No runs yet", "Start one with this command, or fill in the launch form.", { code: startCommand(), action: linkTo("#/launch", "Launch a run", "primary") }));
	}

	async function lookAtServices() {
		// Where the API does not answer, the list says so.
		const listed = await api.services(stop.signal).catch(() => null);
		const bad = (listed?.data ?? []).filter((s) => s.state === "crash-looping");
		const text = JSON.stringify(bad);
		// Text that a screen reader has read out is not replaced by the same text.
		if (text !== services.dataset.shown) fill(services, bad.map(looping));
		services.dataset.shown = text;
	}

	async function refresh() {
		lookAtServices();
		try {
			const found = [];
			let page = null;
			// A filter is for the newest 2,000 runs, not only for those on the pages shown. With a
			// status a page of the API may be thin, and lead on.
			const enough = () => (search.value ? MOST * MOST_PAGES : pages * PAGE);
			for (let i = 0; (i < MOST_PAGES || i < pages) && found.length < enough() && (!page || page.has_more); i++) {
				page = await api.runs({ limit: search.value ? MOST : PAGE, after: page?.next_after, status: status.value }, stop.signal);
				found.push(...page.data);
			}
			all = found;
			more.hidden = !page.has_more;
			showLink("polling");
			paint();
		} catch (error) {
			if (error.name === "AbortError") return;
			showLink("reconnecting");
			if (!all.length) {
				scroll.hidden = true;
				fill(state, trouble(error, h("button", { onclick: refresh }, "Try again")));
			}
		}
		ready("runs");
	}

	const look = debounced(() => more.hidden || refresh(), 300);
	const timer = setInterval(() => document.hidden || refresh(), POLL_MS);
	refresh();
	return {
		destroy() {
			stop.abort();
			clearInterval(timer);
			unbind();
			showLink("ended");
		},
	};
}
