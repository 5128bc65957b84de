// When a server of a run was missing, judging by its events, and the spans of work cut by that.

const LOAD_WITHIN_S = 60;

/**
 * Spans {role, index, from, to, text} in which a lost server was missing: from its last sign of life
 * until another is up; for a trainer, until that has loaded the state it continues from.
 * `reports` are {time, role, index, state, lostAt}, ascending in time (Unix seconds); `loads` are
 * [from, to] of loads of a trainer; `end` is where the timeline ends.
 */
export function faultsOf(reports, loads, end) {
	const open = new Map();
	const found = [];
	const close = (fault, to) => {
		const load = fault.role === "trainer" && to < end ? loads.find(([from]) => from >= to - 1 && from < to + LOAD_WITHIN_S) : null;
		found.push({ ...fault, to: load ? load[1] : to });
	};
	for (const { time, role, index, state, lostAt } of reports) {
		const place = `${role}/${index}`;
		const fault = open.get(place);
		if (state === "up") {
			if (fault || lostAt) close(fault ?? { role, index, from: lostAt }, time);
			open.delete(place);
		} else if (!fault && (lostAt || state !== "starting")) {
			open.set(place, { role, index, from: lostAt ?? time });
		}
	}
	for (const fault of open.values()) close(fault, end);
	return found.sort((a, b) => a.from - b.from);
}

/** What is left of [from, to] without `faults`, and how long they were: {parts, lost}. */
export function without(from, to, faults) {
	const parts = [];
	let at = from;
	for (const fault of faults) {
		if (fault.to <= at || fault.from >= to) continue;
		if (fault.from > at) parts.push([at, fault.from]);
		at = Math.min(fault.to, to);
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
