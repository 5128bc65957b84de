// The config's JSON schema: its keys with their descriptions, and whether a value is valid.

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

/** Every key that holds a value: {types, choices, description, default, minimum, …}. */
export function leaves(schemas, root = "RunConfig") {
	const found = new Map();
	const walk = (node, key, depth) => {
		const own = target(schemas, node);
		const nullable = Boolean((own.anyOf ?? own.oneOf)?.some((one) => one.type === "null"));
		for (const branch of branches(schemas, node)) {
			if (branch.properties && depth < 6) {
				for (const [name, child] of Object.entries(branch.properties)) walk(child, key ? `${key}.${name}` : name, depth + 1);
			} else if (branch.type === "array" && branch.items && target(schemas, branch.items).properties) {
				walk(branch.items, `${key}.0`, depth + 1);
			} else {
				const before = found.get(key) ?? { types: [], choices: [] };
				const choices = new Set([...before.choices, ...(branch.enum ?? (branch.const !== undefined ? [branch.const] : []))]);
				const types = new Set([...before.types, branch.type].filter(Boolean));
				// What tells alternatives apart is described in each of them by its own name only.
				const description = own.const !== undefined && choices.size > 1 ? `One of ${[...choices].join(", ")}.` : (before.description ?? own.description ?? branch.description);
				found.set(key, { ...branch, ...before, types: [...types], choices: [...choices], nullable: before.nullable || nullable, description, default: before.default ?? own.default });
			}
		}
	};
	walk({ $ref: `#/${root}` }, "", 0);
	return found;
}

const LIMITS = {
	minimum: ["at least", (value, limit) => value >= limit],
	exclusiveMinimum: ["more than", (value, limit) => value > limit],
	maximum: ["at most", (value, limit) => value <= limit],
	exclusiveMaximum: ["less than", (value, limit) => value < limit],
};

/** Why `value` is invalid for a leaf, or '' if it is valid. */
export function mistake(leaf, value) {
	if (!leaf || value === null || leaf.choices.includes(value)) return "";
	const { types } = leaf;
	if (typeof value === "number" && types.some((t) => t === "integer" || t === "number")) {
		if (!types.includes("number") && !Number.isInteger(value)) return "must be a whole number";
		const passed = Object.entries(LIMITS).find(([name, [, holds]]) => leaf[name] !== undefined && !holds(value, leaf[name]));
		return passed ? `must be ${passed[1][0]} ${leaf[passed[0]]}` : "";
	}
	const kind = Array.isArray(value) ? "array" : typeof value;
	if (!types.length || types.includes(kind)) return "";
	return leaf.choices.length ? `must be one of ${leaf.choices.join(", ")}` : `must be ${types.join(" or ")}`;
}

/** A value as it is typed. */
export const textOf = (value) => (value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value));

/** Typed text as a JSON value, 'none' as no value where there may be none; text that is not JSON stays text. */
export function valueOf(text, leaf) {
	if (text === "none" && leaf?.nullable) return null;
	if (leaf && leaf.types.length === 1 && leaf.types[0] === "string") return text;
	try {
		return JSON.parse(text);
	} catch {
		return text;
	}
}

/** Puts `value` at `path` of nested `data`; numbers in a path are list indexes. */
export function put(data, path, value) {
	let node = data;
	path.forEach((name, i) => {
		if (i < path.length - 1) node = node[name] ??= /^\d+$/.test(path[i + 1]) ? [] : {};
		else if (value === undefined) delete node[name];
		else node[name] = value;
	});
}

/** The value at dotted `key` of nested `data`. */
export const at = (data, key) => key.split(".").reduce((node, part) => node?.[part], data);

/**
 * The leaves of a resolved config: {key, path, generic, value} each. Envs are keyed by name, as
 * changes of a config name them; `generic` is the key that the schema has ('train.env.0.ratio').
 */
export function flat(value, path = [], generic = []) {
	const inner = value !== null && typeof value === "object" ? Object.entries(value) : [];
	const named = Array.isArray(value) && inner.every(([, section]) => section?.name);
	if (!inner.length || (Array.isArray(value) && !named)) return [{ key: path.join("."), path, generic: generic.join("."), value }];
	return inner.flatMap(([name, below]) => flat(below, [...path, named ? below.name : name], [...generic, named ? "0" : name]));
}
