// When a server of a run was missing, judging by its events, and the spans of work cut by that.

/**
 * Spans {role, index, from, to} in which a lost server was missing: from its last sign of life until
 * another is up, as the event of that says. `reports` are {time, role, index, state, lostAt},
 * ascending in time (Unix seconds); `end` is where the timeline ends.
 */
export function faultsOf(reports, end) {
	const open = new Map();
	const found = [];
	for (const { time, role, index, state, lostAt } of reports) {
		const place = `${role}/${index}`;
		const fault = open.get(place);
		if (state === "up") {
			if (fault || lostAt) found.push({ ...(fault ?? { role, index, from: lostAt }), to: time });
			open.delete(place);
		} else if (!fault && (lostAt || state !== "starting")) {
			open.set(place, { role, index, from: lostAt ?? time });
		}
	}
	for (const fault of open.values()) found.push({ ...fault, to: end });
	return found.sort((a, b) => a.from - b.from);
}

/**
 * Spans {from, to} in which no trainer could train: it was lost, or it was up and loaded the state
 * that it continues from. `loads` are [lane, from, to].
 */
export const awayOf = (faults, loads) => [...faults.filter(({ role }) => role === "trainer"), ...loads.map(([, from, to]) => ({ from, to }))].sort((a, b) => a.from - b.from);

/** What is left of [from, to] without the ascending spans `away`, and how long those were: {parts, lost}. */
export function without(from, to, away) {
	const parts = [];
	let at = from;
	for (const one of away) {
		if (one.to <= at || one.from >= to) continue;
		if (one.from > at) parts.push([at, one.from]);
		at = Math.min(one.to, to);
	}
	if (at < to) parts.push([at, to]);
	return { parts, lost: Math.max(0, to - from - parts.reduce((sum, [a, b]) => sum + b - a, 0)) };
}

/** Until when a sample at `time` holds, if the next comes at `next`. A worker with nothing to do falls silent: its last sample before a silence of more than `most` seconds holds no longer than a moment. */
export const heldUntil = (time, next, busy, most) => (next - time <= most ? next : time + (busy ? most : 0));

/** Stretches [from, to] of ascending `samples` longer than `most` seconds in which `busy` ones were followed by none. */
export function gapsOf(samples, most, busy) {
	const gaps = [];
	for (let i = 1; i < samples.length; i++) {
		const [from, to] = [samples[i - 1].time, samples[i].time];
		if (to - from > most && busy(samples[i - 1])) gaps.push([from + most, to]);
	}
	return gaps;
}
