// Starts the dashboard: routes addresses to pages, and sets up theme, keys and shortcuts.

import { onKeyNeeded } from "./api.js";
import { ask } from "./dialog.js";
import { fill, h, linkTo, notice } from "./dom.js";
import { bindKeys, showKeys } from "./keyboard.js";
import { themeButton } from "./theme.js";

const PAGES = {
	runs: () => import("./runs.js"),
	run: () => import("./run.js"),
	compare: () => import("./compare.js"),
	launch: () => import("./launch.js"),
};

/** '#/runs/ID/timeline?a=b' as {page, id, tab, params}. */
export function route(hash = location.hash) {
	const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
	const [page = "", id, tab] = path.split("/").map(decodeURIComponent);
	const params = new URLSearchParams(query);
	if (page === "runs" && id) return { page: "run", id, tab: tab || "metrics", params };
	return { page: page || "runs", params };
}

const main = document.getElementById("main");
let current = null;
let serial = 0;

async function show() {
	const asked = route();
	if (current?.page === asked.page && current.id === asked.id && current.shown?.navigate) {
		current.shown.navigate(asked);
		return;
	}
	const mine = ++serial;
	current?.shown?.destroy?.();
	current = { page: asked.page, id: asked.id };
	delete document.documentElement.dataset.ready;
	for (const link of document.querySelectorAll("#nav a")) {
		const here = link.dataset.nav === asked.page || (link.dataset.nav === "runs" && asked.page === "run");
		if (here) link.setAttribute("aria-current", "page");
		else link.removeAttribute("aria-current");
	}
	const load = PAGES[asked.page];
	if (!load) {
		fill(main, notice("No such page", "This address does not name a page of the dashboard.", { action: linkTo("#/runs", "All runs") }));
		return;
	}
	const module = await load();
	if (mine !== serial) return;
	fill(main);
	current.shown = module.show(main, asked);
	scrollTo(0, 0);
}

onKeyNeeded(async () => {
	const given = await ask({
		title: "This API requires a key",
		text: "It is kept until this tab is closed and sent only to this server.",
		fields: [h("label", {}, "API key", h("input", { name: "key", type: "password", required: true, autocomplete: "off" }))],
		verb: "Use key",
	});
	return given?.key ?? null;
});

themeButton(document.getElementById("theme"));
document.getElementById("keys").addEventListener("click", showKeys);
bindKeys({ "g r": ["All runs", () => (location.hash = "#/runs")], "g l": ["Launch a run", () => (location.hash = "#/launch")], "?": ["These shortcuts", showKeys] });
addEventListener("hashchange", show);
show();
