// The config's JSON schema: its keys with what they mean, and whether a value may be.

import { api } from "./api.js";

let loading = null;

/** The schema of a run's config with its definitions, from the API's own document. */
export function schemaOf() {
	loading ??= api.document().then((document) => document.components.schemas, (error) => {
		loading = null;
		throw error;
	});
	return loading;
}

const target = (schemas, node) => (node.$ref ? { ...schemas[node.$ref.split("/").pop()], ...node, $ref: undefined } : node);

/** The alternatives of a node, null left out. */
function branches(schemas, node) {
	const found = target(schemas, node);
	const some = found.anyOf ?? found.oneOf;
	return some ? some.map((one) => target(schemas, one)).filter((one) => one.type !== "null") : [found];
}

/** Every key that holds a value: {key, type, choices, description, default, minimum, …}. */
export function leaves(schemas, root = "RunConfig") {
	const found = new Map();
	const walk = (node, key, depth) => {
		const own = target(schemas, node);
		for (const branch of branches(schemas, node)) {
			const rest = { description: own.description ?? branch.description, default: own.default };
			if (branch.properties && depth < 6) {
				for (const [name, child] of Object.entries(branch.properties)) walk(child, key ? `${key}.${name}` : name, depth + 1);
			} else if (branch.type === "array" && branch.items && target(schemas, branch.items).properties) {
				walk(branch.items, `${key}.0`, depth + 1);
			} else {
				const before = found.get(key);
				const choices = [...(before?.choices ?? []), ...(branch.enum ?? (branch.const !== undefined ? [branch.const] : []))];
				const types = [...new Set([...(before?.types ?? []), branch.type].filter(Boolean))];
				found.set(key, { ...branch, ...before, key, types, choices: [...new Set(choices)], description: before?.description ?? rest.description, default: before?.default ?? rest.default });
			}
		}
	};
	walk({ $ref: `#/${root}` }, "", 0);
	return found;
}

/** Why `text` cannot be the value of a leaf, or '' if it can. */
export function mistake(leaf, value) {
	if (!leaf || value === null) return "";
	if (leaf.choices.includes(value)) return "";
	const numeric = leaf.types.some((t) => t === "integer" || t === "number");
	if (typeof value === "number" && numeric) {
		if (leaf.types.includes("integer") && !leaf.types.includes("number") && !Number.isInteger(value)) return "must be a whole number";
		if (leaf.minimum !== undefined && value < leaf.minimum) return `must be at least ${leaf.minimum}`;
		if (leaf.exclusiveMinimum !== undefined && value <= leaf.exclusiveMinimum) return `must be more than ${leaf.exclusiveMinimum}`;
		if (leaf.maximum !== undefined && value > leaf.maximum) return `must be at most ${leaf.maximum}`;
		if (leaf.exclusiveMaximum !== undefined && value >= leaf.exclusiveMaximum) return `must be less than ${leaf.exclusiveMaximum}`;
		return "";
	}
	const kinds = { string: "string", boolean: "boolean", object: "object", number: "number", integer: "number", array: "object" };
	if (!leaf.types.length || leaf.types.some((t) => kinds[t] === typeof value)) return "";
	if (leaf.choices.length) return `must be one of ${leaf.choices.join(", ")}`;
	return `must be ${leaf.types.join(" or ")}`;
}

/** What was typed, as a JSON value; text that is none stays text. */
export function valueOf(text, leaf) {
	if (leaf && leaf.types.length === 1 && leaf.types[0] === "string") return text;
	try {
		return JSON.parse(text);
	} catch {
		return text;
	}
}

/** Puts `value` at dotted `key` of nested `data`; numbers in a key are places of a list. */
export function put(data, key, value) {
	const parts = key.split(".");
	let node = data;
	parts.forEach((part, i) => {
		const name = Array.isArray(node) ? Number(part) : part;
		if (i === parts.length - 1) {
			if (value === undefined) delete node[name];
			else node[name] = value;
		} else {
			node[name] ??= /^\d+$/.test(parts[i + 1]) ? [] : {};
			node = node[name];
		}
	});
}

/** The value at dotted `key` of nested `data`. */
export const at = (data, key) => key.split(".").reduce((node, part) => node?.[part], data);

/** Nested data as [dotted key, value] of its leaves. */
export function flat(data, above = "") {
	if (data === null || typeof data !== "object" || !Object.keys(data).length) return [[above, data]];
	return Object.entries(data).flatMap(([name, value]) => flat(value, above ? `${above}.${name}` : name));
}
