// Everything that runs concurrently, on one time axis: rollouts in flight, the trainer, weight syncs,
// evals, checkpoints, and faults with their recoveries.

import { api } from "./api.js";
import { fill, h, loading, notice, ready, table, trouble } from "./dom.js";
import { loadEvents } from "./events.js";
import { awayOf, faultsOf, gapsOf, heldUntil, without } from "./faults.js";
import { clock, damageLine, duration, num } from "./format.js";
import { bindKeys } from "./keyboard.js";
import { cssVar, onTheme } from "./theme.js";

const KEYS = ["time/wait_for_batch", "time/train", "time/sync_weights", "time/scoring"];
/** Workers report every ten seconds what is in flight; a longer silence is shown as a gap. */
const GAP_S = 15;
const MARKED = "server,work.failed,run.asked,run.status,run.resumed,run.config,run.ended,run.stuck,run.trouble,run.warning,run.alarm,run.health,run.eval,run.eval_started";
const LANES = [
	{ id: "flight", label: "Rollouts in flight", height: 120 },
	{ id: "trainer", label: "Trainer", height: 24 },
	{ id: "sync", label: "Weights to the engines", height: 18 },
	{ id: "eval", label: "Evals", height: 18 },
	{ id: "work", label: "Checkpoints, restores, other work", height: 18 },
	{ id: "faults", label: "Faults, recoveries, requests, status", height: 24 },
];
const HEAD = 20;
const AXIS = 26;
// One colour or shape for one meaning; hatching marks something missing.
const LEGEND = { train: ["train rollouts", 0], eval: ["eval rollouts", 3], trains: ["trainer trains", 1], wait: ["trainer waits for rollouts", 7], scoring: ["trainer waits for scoring", 6], sync: ["weight sync", 2], evals: ["evals", 4], work: ["checkpoint and other work", 5] };
/** Marks of events: [text, colour, shape]. */
const MARKS = { fault: ["fault", "bad", "dot"], warning: ["warning", "warn", "dot"], recovery: ["recovery", "good", "dot"], request: ["request", "text", "dot"], status: ["server or status", "muted", "ring"] };
const PERMITS = ["permits", "text", "d0"];
const HATCHED = [["server lost", "bad", "hatched"], ["no report of rollouts in flight", "muted", "hatched"]];
/** In which lane the loss of a server shows, beside that of faults. */
const LANE_OF = { trainer: "trainer", engine: "sync" };
const HATCH_PX = 6;
/** What a label of permits takes, above their line. */
const LABEL_WIDTH = 80;
const LABEL_HEIGHT = 16;
const NICE_S = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];

/** Whether a sample has rollouts in flight, at its worker or in dispatch. */
const isBusy = (gauge) => gauge.worker_inflight !== 0 || (gauge.inflight_train ?? 0) + (gauge.inflight_eval ?? 0) > 0;

/** The first place in `list`, ascending by `value`, that is not below `wanted`. */
function place(list, wanted, value) {
	let low = 0;
	let high = list.length;
	while (low < high) {
		const middle = (low + high) >> 1;
		if (value(list[middle]) < wanted) low = middle + 1;
		else high = middle;
	}
	return low;
}

/**
 * Spans [lane, from, to, colour, text] of a step's record, which was written as the step ended. The
 * record's training time has that in which its trainer was `away` (lost or loading), which is cut out.
 */
function spansOf({ step, time, metrics }, away) {
	const [wait, train, sync, scoring] = KEYS.map((key) => metrics[key] ?? 0);
	const trained = time - sync;
	const began = trained - train;
	const cut = (from, to, tone, text) => {
		const { parts, lost } = without(from, to, away);
		const said = text(duration(to - from - lost)) + (lost ? `; the trainer was lost or loading for ${duration(lost)}` : "");
		return parts.map(([a, b]) => ["trainer", a, b, tone, said]);
	};
	return [
		...cut(began - scoring - wait, began - scoring, "wait", (time) => `Step ${step}: trainer waits for rollouts, ${time}`),
		...(scoring ? cut(began - scoring, began, "scoring", (time) => `Step ${step}: trainer waits for scoring, ${time}`) : []),
		...cut(began, trained, "trains", (time) => `Step ${step}: trains for ${time}`),
		["sync", trained, time, "sync", `Step ${step}: weights reach the engines in ${duration(sync)}`],
	];
}

/**
 * The mark of an event; null for one that the timeline leaves out. A server that comes up for the
 * first time has not recovered from anything.
 */
function markOf({ type, level, data }) {
	if (level === "error" || /^(server\.down|work\.failed|run\.trouble)$/.test(type)) return "fault";
	if (level === "warning") return "warning";
	if (type === "run.resumed" || (type === "server.up" && data.lost_at)) return "recovery";
	if (/^run\.(asked|config)$/.test(type)) return "request";
	return /^(server\.|run\.(status|ended))/.test(type) ? "status" : null;
}

/** Hatches a rectangle: something is missing there. */
function hatch(pen, x, y, width, height, color) {
	pen.save();
	pen.beginPath();
	pen.rect(x, y, Math.max(width, 1), height);
	pen.clip();
	pen.strokeStyle = color;
	pen.lineWidth = 1.5;
	pen.beginPath();
	for (let at = x - height - ((x - height) % HATCH_PX); at < x + width; at += HATCH_PX) {
		pen.moveTo(at, y + height);
		pen.lineTo(at + height, y);
	}
	pen.stroke();
	pen.restore();
}

/** A mark of the legend with its meaning. */
const chip = ([text, color, kind]) => h("span", { class: "chip", vars: { "--c": `var(--${color})` } }, h("i", { class: kind }), text);

export function show(root, data) {
	const stop = new AbortController();
	const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Timeline of the run. Arrow keys move, plus and minus zoom. Faults and recoveries are listed below." });
	const tip = h("div", { class: "tip", hidden: true });
	const list = h("div", {});
	const rest = h("p", { class: "sub" });
	const damage = h("p", { class: "wrong", role: "status" });
	const state = h("div", {}, loading());
	const button = (text, label, work) => h("button", { title: label, "aria-label": text.length > 1 ? null : label, onclick: work }, text);
	const last = (seconds) => () => look(end() - seconds, end());
	const frame = h("div", { class: "timeline" }, canvas, tip);
	fill(
		root,
		h(
			"div",
			{ class: "tools" },
			button("All", "The whole run", () => look(begin(), end())),
			button("Last hour", "The last hour", last(3600)),
			button("Last 10 min", "The last ten minutes", last(600)),
			button("+", "Zoom in", () => zoom(0.6)),
			button("−", "Zoom out", () => zoom(1 / 0.6)),
			h("span", { class: "legend" }, [...Object.values(LEGEND).map(([text, color]) => [text, `series-${color}`, "d0"]), PERMITS, ...Object.values(MARKS), ...HATCHED].map(chip)),
		),
		frame,
		damage,
		state,
		h("h2", {}, "Faults, recoveries, requests and status"),
		list,
		rest,
	);

	const damaged = new Set();
	let records = [];
	let spans = [];
	let marks = [];
	let works = [];
	const evals = {};
	let reports = [];
	let loads = [];
	let faults = [];
	let gaps = [];
	const seen = new Set();
	let view = null;
	let follow = true;
	let asked = 0;
	let colors = {};

	const begin = () => Math.min(spans[0]?.[1] ?? Infinity, data.gauges[0]?.time ?? Infinity, works[0]?.[1] ?? Infinity, faults[0]?.from ?? Infinity, marks.find(([, tone]) => tone !== "status")?.[0] ?? Infinity);
	const end = () => Math.max(records.at(-1)?.time ?? 0, data.gauges.at(-1)?.time ?? 0, works.at(-1)?.[2] ?? 0, marks.at(-1)?.[0] ?? 0);

	function look(from, to) {
		const [low, high] = [begin(), end()];
		if (!(high > low)) return;
		const width = Math.min(Math.max(to - from, 2), high - low);
		const left = Math.min(Math.max(from, low), high - width);
		view = [left, left + width];
		follow = left + width >= high - 1;
		draw();
	}
	/** Shows the last half hour, or all of a shorter run. */
	const open = () => look(Math.max(begin(), end() - 1800), end());
	const zoom = (by, around = (view[0] + view[1]) / 2) => look(around - (around - view[0]) * by, around + (view[1] - around) * by);
	const move = (share) => look(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

	function draw() {
		cancelAnimationFrame(asked);
		asked = requestAnimationFrame(paint);
	}

	const lanes = () => {
		let y = 0;
		return LANES.map((lane) => {
			const top = y + HEAD;
			y = top + lane.height;
			return { ...lane, top };
		});
	};

	function paint() {
		if (!view) return;
		const ratio = devicePixelRatio || 1;
		const width = frame.clientWidth;
		const laid = lanes();
		const height = laid.at(-1).top + laid.at(-1).height + AXIS;
		canvas.style.height = `${height}px`;
		canvas.width = width * ratio;
		canvas.height = height * ratio;
		const pen = canvas.getContext("2d");
		pen.scale(ratio, ratio);
		const [from, to] = view;
		const x = (time) => ((time - from) / (to - from)) * width;
		const top = Object.fromEntries(laid.map((lane) => [lane.id, lane]));
		pen.font = "12px system-ui, sans-serif";
		const every = NICE_S.find((s) => s * (width / (to - from)) > 110) ?? NICE_S.at(-1);
		pen.strokeStyle = colors.grid;
		for (let t = Math.ceil(from / every) * every; t < to; t += every) {
			pen.beginPath();
			pen.moveTo(x(t), 0);
			pen.lineTo(x(t), height - AXIS);
			pen.stroke();
			pen.fillStyle = colors.muted;
			pen.fillText(clock(t), Math.min(x(t) + 3, width - 90), height - 8);
		}
		flights(pen, x, width, top.flight);
		for (const some of [spans, works, evalSpans()]) {
			const first = Math.max(0, place(some, from, (s) => s[2]) - 3);
			for (let i = first; i < some.length && some[i][1] <= to; i++) {
				const [lane, start, till, tone] = some[i];
				const { top: y, height: tall } = top[lane];
				pen.fillStyle = colors[tone];
				pen.fillRect(x(start), y, Math.max(0.6, x(till) - x(start) - 0.4), tall);
			}
		}
		// Of marks at one place the gravest is seen.
		for (const [time, tone] of Object.keys(MARKS).reverse().flatMap((name) => marks.filter((mark) => mark[1] === name))) {
			if (time < from || time > to) continue;
			const { top: y, height: tall } = top.faults;
			pen.fillStyle = pen.strokeStyle = colors[tone];
			pen.beginPath();
			if (MARKS[tone][2] === "ring") {
				pen.lineWidth = 2;
				pen.arc(x(time), y + tall / 2, 4, 0, 7);
				pen.stroke();
			} else {
				pen.arc(x(time), y + tall / 2, 5, 0, 7);
				pen.fill();
			}
			if (tone === "fault" || tone === "warning") pen.fillRect(x(time) - 0.5, 0, 1, height - AXIS);
		}
		for (const { role, from: lost, to: back } of faults) {
			if (back < from || lost > to) continue;
			for (const lane of [LANE_OF[role], "faults"]) {
				if (!lane) continue;
				const { top: y, height: tall } = top[lane];
				hatch(pen, x(lost), y, x(back) - x(lost), tall, colors.fault);
			}
		}
		pen.fillStyle = colors.text;
		for (const { label, top: y } of laid) pen.fillText(label, 6, y - 6);
	}

	/** Evals from their first group to their result; those still in progress reach to the end. */
	const evalSpans = () => Object.values(evals).map(({ from, to, text }) => ["eval", from ?? to, to >= (from ?? to) ? to : end(), "evals", text]).sort((a, b) => a[1] - b[1]);

	/** Train and eval rollouts as stacked areas, the maximum of each pixel, and permits as a line with a label at each change. */
	function flights(pen, x, width, { top, height }) {
		const { gauges } = data;
		const cells = Array.from({ length: Math.ceil(width) + 1 }, () => [0, 0, 0]);
		let most = 1;
		for (let i = Math.max(0, place(gauges, view[0], (g) => g.time) - 2); i < gauges.length && gauges[i].time <= view[1]; i++) {
			const g = gauges[i];
			const till = heldUntil(g.time, gauges[i + 1]?.time ?? g.time + 5, isBusy(g), GAP_S);
			most = Math.max(most, g.permits ?? 0, (g.inflight_train ?? 0) + (g.inflight_eval ?? 0));
			for (let c = Math.max(0, Math.floor(x(g.time))); c <= Math.min(cells.length - 1, x(till)); c++) {
				const cell = cells[c];
				if ((g.inflight_train ?? 0) + (g.inflight_eval ?? 0) >= cell[0] + cell[1]) [cell[0], cell[1]] = [g.inflight_train ?? 0, g.inflight_eval ?? 0];
				cell[2] = Math.max(cell[2], g.permits ?? 0);
			}
		}
		const scale = (height - LABEL_HEIGHT) / most;
		const labels = [];
		let said = 0;
		let free = 0;
		cells.forEach(([train, evals, permits], c) => {
			pen.fillStyle = colors.train;
			pen.fillRect(c, top + height - train * scale, 1, train * scale);
			pen.fillStyle = colors.eval;
			pen.fillRect(c, top + height - (train + evals) * scale, 1, evals * scale);
			pen.fillStyle = colors.text;
			if (!permits) return;
			const y = top + height - permits * scale;
			pen.fillRect(c, y, 1, 1);
			// A change too close to the last label is labelled once there is room.
			if (permits === said || c < free) return;
			labels.push([`permits ${num(permits)}`, Math.min(c + 3, width - LABEL_WIDTH), y - 4]);
			[said, free] = [permits, c + LABEL_WIDTH];
		});
		for (const [from, to] of gaps) if (to > view[0] && from < view[1]) hatch(pen, x(from), top, x(to) - x(from), height, colors.muted);
		// After the areas, which would cover them.
		pen.fillStyle = colors.text;
		for (const label of labels) pen.fillText(...label);
	}

	const missing = (time, wanted) => faults.filter((one) => one.from <= time && time <= one.to && wanted(one)).map(({ role, index, from, to }) => `No ${role} ${index} for ${duration(to - from)}`);

	function point(event) {
		if (!view) return;
		const box = canvas.getBoundingClientRect();
		const time = view[0] + ((event.clientX - box.left) / box.width) * (view[1] - view[0]);
		const y = event.clientY - box.top;
		const near = (view[1] - view[0]) * (6 / box.width);
		const lane = lanes().find((one) => y >= one.top - HEAD && y < one.top + one.height);
		const lines = [clock(time)];
		if (lane?.id === "flight") {
			const g = data.gauges[Math.max(0, place(data.gauges, time, (one) => one.time) - 1)];
			if (gaps.some(([from, to]) => from <= time && time <= to)) lines.push("No rollout worker reported what was in flight.");
			else if (g) lines.push(`${g.inflight_train ?? 0} train and ${g.inflight_eval ?? 0} eval rollouts of ${g.permits ?? "?"} permits`, g.waiting_for && `held back by: ${g.waiting_for}`);
		} else if (lane?.id === "faults") {
			lines.push(...marks.filter(([at]) => Math.abs(at - time) < near).slice(0, 4).map(([, , text]) => text), ...missing(time, () => true));
		} else if (lane) {
			lines.push(...missing(time, ({ role }) => LANE_OF[role] === lane.id), ...[...spans, ...works, ...evalSpans()].filter(([id, from, to]) => id === lane.id && from - near / 3 <= time && to + near / 3 >= time).slice(0, 3).map((s) => s[4]));
		}
		fill(tip, lines.filter(Boolean).map((line) => h("div", {}, line)));
		tip.hidden = false;
		tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth - 4)}px`;
		tip.style.top = `${y + 14}px`;
	}

	let held = null;
	canvas.addEventListener("pointerdown", (e) => {
		if (!view) return;
		held = { x: e.clientX, view };
		canvas.setPointerCapture(e.pointerId);
	});
	canvas.addEventListener("pointermove", (e) => {
		if (held) {
			const by = ((held.x - e.clientX) / canvas.clientWidth) * (held.view[1] - held.view[0]);
			look(held.view[0] + by, held.view[1] + by);
		} else point(e);
	});
	for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (held = null));
	canvas.addEventListener("pointerleave", () => (tip.hidden = true));
	canvas.addEventListener("wheel", (e) => {
		if (!view) return;
		e.preventDefault();
		zoom(e.deltaY > 0 ? 1.25 : 0.8, view[0] + (e.offsetX / canvas.clientWidth) * (view[1] - view[0]));
	}, { passive: false });
	const unbind = bindKeys({ ArrowLeft: ["Earlier", () => move(-0.2)], ArrowRight: ["Later", () => move(0.2)], "+": ["Zoom in", () => zoom(0.6)], "-": ["Zoom out", () => zoom(1 / 0.6)], 0: ["The whole run", () => look(begin(), end())] });

	function takeEvents(events) {
		for (const event of events) {
			if (seen.has(event.id)) continue;
			seen.add(event.id);
			const time = Date.parse(event.created_at) / 1000;
			const { type, message, data: fields } = event;
			if (type.startsWith("server.")) reports.push({ time, role: fields.role, index: fields.index, state: fields.state, lostAt: fields.lost_at ? Date.parse(fields.lost_at) / 1000 : null });
			if (/^work\./.test(type)) {
				const span = [fields.started_at, fields.finished_at].map((moment) => Date.parse(moment) / 1000);
				if (type === "work.done" && !/train_step|sync_weights|ship_batch|eval/.test(fields.work)) works.push(["work", ...span, "work", message]);
				// It keeps the trainer from training, even one that fails.
				if (fields.work === "load_trainer") loads.push(["trainer", ...span, "work", message]);
			}
			if (/^run\.eval/.test(type)) {
				const one = (evals[fields.epoch ?? event.id] ??= {});
				const edge = type === "run.eval" ? "to" : "from";
				one[edge] = Math.max(time, one[edge] ?? 0);
				if (edge === "from" || !one.text) one.text = message.replace(/ begins$/, "");
			}
			const mark = markOf(event);
			if (mark) marks.push([time, mark, message]);
		}
		works.sort((a, b) => a[1] - b[1]);
		reports.sort((a, b) => a.time - b.time);
		lay();
		marks.sort((a, b) => a[0] - b[0]);
		const rows = marks.slice(-200).reverse().map(([time, tone, text]) => h("tr", { class: `mark-${tone}` }, h("td", {}, h("button", { class: "small", onclick: () => (look(time - 60, time + 60), frame.scrollIntoView({ block: "center" })) }, clock(time))), h("td", {}, chip(MARKS[tone])), h("td", {}, text)));
		fill(list, rows.length ? table("Faults, recoveries, requests and status", "events", null, rows) : h("p", { class: "sub" }, "Nothing has happened to the run so far."));
	}

	/** Recomputes the spans: an event may change those of earlier records. */
	function lay() {
		faults = faultsOf(reports, end());
		gaps = gapsOf(data.gauges, GAP_S, isBusy);
		const away = awayOf(faults, loads);
		spans = [...records.flatMap((record) => spansOf(record, away)), ...loads].sort((a, b) => a[1] - b[1]);
	}

	async function newer() {
		for (;;) {
			const page = await api.metrics(data.id, { keys: KEYS, after: records.at(-1)?.step ?? -1 }, stop.signal);
			records.push(...page.data);
			page.damaged.forEach((step) => damaged.add(step));
			if (!page.has_more) break;
		}
		damage.textContent = damageLine("steps", [...damaged]);
		await data.loadGauges(stop.signal);
		lay();
	}

	function paletted() {
		colors = { text: cssVar("--text"), muted: cssVar("--muted"), grid: cssVar("--grid") };
		for (const [name, [, color]] of Object.entries(MARKS)) colors[name] = cssVar(`--${color}`);
		for (const [name, [, at]] of Object.entries(LEGEND)) colors[name] = cssVar(`--series-${at}`);
		draw();
	}

	async function load() {
		try {
			await newer();
			fill(state, end() ? null : notice("Nothing to see yet", "The timeline begins with the first rollouts."));
			if (end()) open();
		} catch (error) {
			if (error.name !== "AbortError") fill(state, trouble(error));
		}
		ready("timeline");
		try {
			for (const [types, text] of [[MARKED, "Faults, requests and evals"], ["work.done", "Checkpoints and other work"]]) {
				let left = "";
				await loadEvents(data.id, stop.signal, (found, next) => {
					takeEvents(found);
					if (view && follow) open();
					left = next && found.length ? `${text} before ${clock(Date.parse(found.at(-1).created_at) / 1000)} are not shown. ` : next && left;
				}, { types });
				rest.append(left ?? "");
			}
		} catch (error) {
			if (error.name !== "AbortError") fill(list, trouble(error));
		}
	}

	const sizing = new ResizeObserver(draw);
	sizing.observe(frame);
	const offTheme = onTheme(paletted);
	paletted();
	const loaded = load();
	return {
		async update() {
			await loaded;
			const width = view && view[1] - view[0];
			await newer();
			if (!view && end()) open();
			else if (view && follow) look(end() - width, end());
			if (end()) fill(state);
		},
		onEvent: (event) => (takeEvents([event]), draw()),
		destroy() {
			stop.abort();
			unbind();
			offTheme();
			sizing.disconnect();
		},
	};
}
