// Speaks to the REST API. Every request of the dashboard goes through here.

const BASE = new URL("../../v1", import.meta.url).pathname;
const KEY = "ratchet.key";

/** A reply that is not a success, with its problem document (RFC 9457). */
export class ApiError extends Error {
	constructor(status, problem) {
		super(problem?.detail ?? problem?.title ?? "The API gave no reason.");
		this.status = status;
		this.title = problem?.title ?? (status ? `Error ${status}` : "The API cannot be reached");
		this.kind = problem?.type ?? "";
		this.errors = problem?.errors ?? [];
	}
}

let askForKey = null;
let asking = null;
/** `ask` is called when a key is required; it resolves to one, or to null if none was entered. */
export const onKeyNeeded = (ask) => (askForKey = ask);

/** Whether another key was entered; concurrent requests share one prompt. */
function keyGiven() {
	asking ??= askForKey().then((key) => {
		if (!key) return false;
		sessionStorage.setItem(KEY, key);
		asking = null;
		return true;
	});
	return asking;
}

function headers(more = {}) {
	const key = sessionStorage.getItem(KEY);
	return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

function address(path, params = {}) {
	const query = new URLSearchParams();
	for (const [name, value] of Object.entries(params)) {
		if (value === null || value === undefined || value === "") continue;
		for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
	}
	const text = query.toString();
	return `${BASE}${path}${text ? `?${text}` : ""}`;
}

const sleep = (ms, signal) =>
	new Promise((resolve) => {
		const timer = setTimeout(resolve, ms);
		signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
	});

async function request(method, path, how) {
	const { params, body, type = "application/json", signal, extra } = how;
	const options = { method, signal, headers: headers(extra) };
	if (body !== undefined) {
		options.headers["Content-Type"] = type;
		options.body = typeof body === "string" ? body : JSON.stringify(body);
	}
	let answer;
	try {
		answer = await fetch(address(path, params), options);
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new ApiError(0, { detail: "No answer from the API. Is it still running? Trying again." });
	}
	if (answer.status === 401 && (await keyGiven())) return request(method, path, how);
	if (answer.status === 429 && method === "GET") {
		await sleep(1000 * Number(answer.headers.get("retry-after") ?? 1), signal);
		return request(method, path, how);
	}
	if (!answer.ok) throw new ApiError(answer.status, await answer.json().catch(() => null));
	return answer.status === 204 ? null : answer.json();
}

const get = (path, params, signal) => request("GET", path, { params, signal });
const run = (id) => `/runs/${encodeURIComponent(id)}`;

/**
 * Submits a form; `sent` is the form's own Map. An unchanged form is sent again with the same key until
 * it succeeds, so that it takes effect once even if a reply was lost.
 */
async function send(sent, method, path, body, type) {
	const said = JSON.stringify([method, path, body, type]);
	if (!sent.has(said)) sent.set(said, crypto.getRandomValues(new Uint32Array(4)).join("-"));
	const answer = await request(method, path, { body, type, extra: { "Idempotency-Key": sent.get(said) } });
	sent.delete(said);
	return answer;
}

export const api = {
	runs: (params, signal) => get("/runs", params, signal),
	run: (id, signal) => get(run(id), {}, signal),
	health: (id, signal) => get(`${run(id)}/health`, {}, signal),
	/** `keys`: requested metrics; `points`: at most so many steps, extremes kept. */
	metrics: (id, { keys, after = -1, until, points, limit = 10000 }, signal) =>
		get(`${run(id)}/metrics`, { after_step: after, until_step: until, keys: keys?.join(","), points, limit }, signal),
	evals: (id, signal) => get(`${run(id)}/evals`, {}, signal),
	/** The last evals of a run against those of another. */
	compareEvals: (id, to, signal) => get(`${run(id)}/evals/comparison`, { to }, signal),
	gauges: (id, params, signal) => get(`${run(id)}/gauges`, params, signal),
	events: (id, params, signal) => get(`${run(id)}/events`, params, signal),
	checkpoints: (id, signal) => get(`${run(id)}/checkpoints`, {}, signal),
	/** A version of the policy: of a `step`, the `best` of an eval, or the last checkpoint. */
	model: (id, params, signal) => get(`${run(id)}/model`, params, signal),
	/** The current config, or one revision of it. */
	config: (id, revision) => get(`${run(id)}/config`, { revision }),
	rollouts: (id, params, signal) => get(`${run(id)}/rollouts`, params, signal),
	rollout: (id, rollout, signal) => get(`${run(id)}/rollouts/${encodeURIComponent(rollout)}`, {}, signal),
	act: (sent, id, verb, body) => send(sent, "POST", `${run(id)}/${verb}`, body),
	note: (sent, id, body) => send(sent, "PUT", `${run(id)}/note`, body),
	change: (sent, id, patch) => send(sent, "PATCH", run(id), patch),
	create: (sent, body, type) => send(sent, "POST", "/runs", body, type),
	services: (signal) => get("/services", {}, signal),
	/** The plan of a config, or its mistakes; nothing is started. With `preflight` workers check it. */
	check: (body, type, { preflight = false, signal } = {}) => request("POST", "/runs", { params: { dry_run: true, preflight }, body, type, signal }),
	document: () => get("/../openapi.json"),
};

/** Events of one block of an event stream. */
function parsed(block) {
	const event = { id: null, type: "message", data: "" };
	for (const line of block.split(/\r?\n/)) {
		const at = line.indexOf(":");
		const name = at < 0 ? line : line.slice(0, at);
		const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
		if (name === "data") event.data += event.data ? `\n${value}` : value;
		else if (name === "id") event.id = value;
		else if (name === "event") event.type = value;
	}
	return event;
}

async function* blocks(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let rest = "";
	for (;;) {
		const { value, done } = await reader.read();
		if (done) return;
		const parts = (rest + value).split(/\r?\n\r?\n/);
		rest = parts.pop();
		yield* parts;
	}
}

/**
 * Follows a run's events until `signal` aborts, over any loss of connection and without repeating
 * one. If the server no longer keeps event `last`, only new events are followed, and `onGap` is
 * called: the missed ones must be loaded again. Fetch is used because EventSource cannot send a key.
 * Resolves to false if the server has no stream of events, so that the caller asks now and then
 * instead.
 */
export async function follow(id, { onEvent, onState, onGap, signal, last = null }) {
	let pause = 500;
	let gap = false;
	while (!signal.aborted) {
		let over = false;
		try {
			const extra = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
			const params = last ? {} : { after: "latest" };
			const answer = await fetch(address(`${run(id)}/events`, params), { signal, headers: headers(extra) });
			if (answer.status === 404 && last) {
				const { type = "" } = await answer.json().catch(() => ({}));
				if (!type.endsWith(":unknown-cursor")) return false;
				last = null;
				gap = true;
				continue;
			}
			if (answer.ok && gap) {
				gap = false;
				onGap();
			}
			if (answer.status === 204) {
				// The stream is complete; the run may be resumed later.
				onState("ended");
				await sleep(15000, signal);
				continue;
			}
			const streams = (answer.headers.get("content-type") ?? "").startsWith("text/event-stream");
			const later = answer.status >= 500 || answer.status === 401 || answer.status === 429;
			if (!later && (!answer.ok || !streams)) return false;
			if (answer.ok) {
				onState("live");
				pause = 500;
				for await (const block of blocks(answer.body)) {
					const event = parsed(block);
					if (event.id !== null) last = event.id;
					over = event.type === "run.ended";
					if (event.data && event.type !== "ready") onEvent({ ...event, ...JSON.parse(event.data) }, last);
					else if (event.id !== null) onEvent(null, last);
				}
			}
		} catch (error) {
			if (signal.aborted) return true;
		}
		if (signal.aborted) return true;
		// A stream that ends with the run is complete.
		onState(over ? "ended" : "reconnecting");
		await sleep(pause, signal);
		pause = Math.min(pause * 2, 8000);
	}
	return true;
}
