// Speaks to the REST API. Every request of the dashboard goes through here.

const BASE = new URL("../../v1", import.meta.url).pathname;
const KEY = "ratchet.key";

/** A reply that is not a success, with its problem document (RFC 9457). */
export class ApiError extends Error {
	constructor(status, problem, path) {
		super(problem?.detail ?? problem?.title ?? `The API answered ${status} to ${path}.`);
		this.status = status;
		this.title = problem?.title ?? (status ? `Error ${status}` : "The API cannot be reached");
		this.kind = problem?.type ?? "";
		this.errors = problem?.errors ?? [];
		this.path = path;
	}
	/** The address itself is unknown to this server, rather than what was asked for. */
	get notServed() {
		return this.status === 405 || this.kind.endsWith(":not-found");
	}
}

let askForKey = null;
let asking = null;
/** `ask` is called when a key is needed; it resolves to one, or to null if none is given. */
export const onKeyNeeded = (ask) => (askForKey = ask);

/** Whether another key was given; several requests ask once, and nobody is asked again. */
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

const problemOf = async (answer) => {
	const kind = answer.headers.get("content-type") ?? "";
	return kind.includes("json") ? answer.json() : null;
};

async function request(method, path, { params, body, type, signal, extra } = {}) {
	const options = { method, signal, headers: headers(extra) };
	if (body !== undefined) {
		options.headers["Content-Type"] = type ?? "application/json";
		options.body = typeof body === "string" ? body : JSON.stringify(body);
	}
	let answer;
	try {
		answer = await fetch(address(path, params), options);
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new ApiError(0, { detail: "No answer from the API. Is it still running? Trying again." }, path);
	}
	if (answer.status === 401 && (await keyGiven())) {
		return request(method, path, { params, body, type, signal, extra });
	}
	if (answer.status === 429 && method === "GET") {
		await new Promise((resolve) => setTimeout(resolve, 1000 * Number(answer.headers.get("retry-after") ?? 1)));
		return request(method, path, { params, signal });
	}
	if (!answer.ok) throw new ApiError(answer.status, await problemOf(answer), path);
	return answer.status === 204 ? null : answer.json();
}

const get = (path, params, signal) => request("GET", path, { params, signal });
const run = (id) => `/runs/${encodeURIComponent(id)}`;

/** A key for requests that must not act twice however often they are sent. */
const once = () => {
	const bytes = crypto.getRandomValues(new Uint8Array(16));
	return { "Idempotency-Key": [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("") };
};

export const api = {
	runs: (params, signal) => get("/runs", params, signal),
	run: (id, signal) => get(run(id), {}, signal),
	/** `keys`: metrics wanted; `points`: at most so many steps, extremes kept. */
	metrics: (id, { keys, after = -1, until, points, limit = 10000 }, signal) =>
		get(`${run(id)}/metrics`, { after_step: after, until_step: until, keys: keys?.join(","), points, limit }, signal),
	evals: (id, signal) => get(`${run(id)}/evals`, {}, signal),
	gauges: (id, params, signal) => get(`${run(id)}/gauges`, params, signal),
	events: (id, params, signal) => get(`${run(id)}/events`, params, signal),
	checkpoints: (id, signal) => get(`${run(id)}/checkpoints`, {}, signal),
	config: (id, signal) => get(`${run(id)}/config`, {}, signal),
	rollouts: (id, params, signal) => get(`${run(id)}/rollouts`, params, signal),
	rollout: (id, rollout, signal) =>
		get(`${run(id)}/rollouts/${rollout.split("/").map(encodeURIComponent).join("/")}`, {}, signal),
	act: (id, verb, body) =>
		request("POST", `${run(id)}/${verb}`, { body: body ?? {}, extra: once() }),
	change: (id, patch) => request("PATCH", run(id), { body: patch }),
	create: (body, { dry = false, type = "application/json" } = {}) =>
		request("POST", "/runs", { params: dry ? { dry_run: true } : {}, body, type, extra: dry ? {} : once() }),
	document: async () => {
		const answer = await fetch(new URL("../../openapi.json", import.meta.url), { headers: headers() });
		if (answer.status === 429 && method === "GET") {
		await new Promise((resolve) => setTimeout(resolve, 1000 * Number(answer.headers.get("retry-after") ?? 1)));
		return request(method, path, { params, signal });
	}
	if (!answer.ok) throw new ApiError(answer.status, null, "/openapi.json");
		return answer.json();
	},
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

const sleep = (ms, signal) =>
	new Promise((resolve) => {
		const timer = setTimeout(resolve, ms);
		signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
	});

/**
 * Follows a run's events until `signal` aborts, over any loss of connection and without repeating
 * one. Fetch is used since EventSource cannot send a key. Resolves to false if the server has no
 * stream of events, so that the caller asks now and then instead.
 */
export async function follow(id, { onEvent, onState, signal, last = null }) {
	let pause = 500;
	while (!signal.aborted) {
		try {
			const extra = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
			const params = last ? {} : { after: "latest" };
			const answer = await fetch(address(`${run(id)}/events`, params), { signal, headers: headers(extra) });
			if (answer.status === 204) {
				// All was told; the run may be taken up again later.
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
					if (event.data && event.type !== "ready") onEvent({ ...event, ...JSON.parse(event.data) }, last);
					else if (event.id !== null) onEvent(null, last);
				}
			}
		} catch (error) {
			if (signal.aborted) return true;
		}
		if (signal.aborted) return true;
		onState("reconnecting");
		await sleep(pause, signal);
		pause = Math.min(pause * 2, 8000);
	}
	return true;
}
