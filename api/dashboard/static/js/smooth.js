// Numbers for charts: smoothing, stacking, and one x axis for many series.

/** Exponential moving average without the pull to zero at its start; gaps stay gaps. */
export function smoothed(ys, factor) {
	if (!factor) return ys;
	let average = 0;
	let weight = 0;
	return ys.map((y) => {
		if (y === null || y === undefined) return null;
		average = average * factor + y * (1 - factor);
		weight = weight * factor + (1 - factor);
		return average / weight;
	});
}

/** Series [xs, ys] on one ascending axis: [x, ys of the first, ys of the second, …]. */
export function aligned(series) {
	const first = series[0]?.[0];
	if (series.every(([xs]) => xs === first)) return [first ?? [], ...series.map(([, ys]) => ys)];
	const all = new Set();
	for (const [xs] of series) for (const x of xs) if (x !== null) all.add(x);
	const x = [...all].sort((a, b) => a - b);
	const at = new Map(x.map((value, i) => [value, i]));
	const columns = series.map(([xs, ys]) => {
		const column = new Array(x.length).fill(undefined);
		xs.forEach((value, i) => {
			if (value !== null) column[at.get(value)] = ys[i];
		});
		return column;
	});
	return [x, ...columns];
}

/** Each column with those before it added, for areas that lie on each other. */
export function stacked(columns) {
	const sums = [];
	return columns.map((ys) => {
		// Thinned columns have their values at different places; the one before holds in between.
		let last = 0;
		return ys.map((y, i) => {
			last = y ?? last;
			sums[i] = (sums[i] ?? 0) + last;
			return sums[i];
		});
	});
}
