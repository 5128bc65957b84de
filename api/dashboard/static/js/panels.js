// The curated panels of a run, most important first. Pure data and functions of names.
//
// A series is drawn from a step metric (`key`), the evals of an env (`from: 'evals'`) or the gauges
// of the workers of a role, if none is named of rollout workers (`from: 'gauges'`, `value` of a
// sample, `sum` over workers or the `worst` of them).

const MOST_OWN = 12;

const step = (key, label) => ({ key, label });

/** `name/<scope>/mean` for all scopes, else the plain `name`. */
function scoped(name, { plain = name, statistic = "mean" } = {}) {
	return ({ names, envs }) => {
		const tail = statistic ? `/${statistic}` : "";
		const found = ["all", ...(envs.length > 1 ? envs : [])]
			.filter((scope) => names.has(`${name}/${scope}${tail}`))
			.map((scope) => step(`${name}/${scope}${tail}`, scope));
		return found.length ? found : names.has(plain) ? [step(plain, plain)] : [];
	};
}

/** Those of `pairs` [key, label] that the run measures. */
const those =
	(...pairs) =>
	({ names }) =>
		pairs.filter(([key]) => names.has(key)).map(([key, label]) => step(key, label));

/** The first of `keys` that the run measures. */
const either =
	(label, ...keys) =>
	({ names }) => {
		const key = keys.find((name) => names.has(name));
		return key ? [step(key, label)] : [];
	};

const together =
	(...makers) =>
	(known) =>
		makers.flatMap((make) => make(known));

const gauge = (label, value, more = {}) => ({ from: "gauges", label, value, ...more });

/** The environments' own metrics, by env if there are several. */
const own = ({ names, envs }) =>
	[...names]
		.filter((name) => name.startsWith("metrics/"))
		.slice(0, MOST_OWN)
		.map((name) => {
			const [, env, ...rest] = name.split("/");
			return step(name, envs.length > 1 ? `${env} · ${rest.join("/")}` : rest.join("/"));
		});

/** Sections in their order; those that a reader adds come first. */
export const YOURS = "Your panels";
export const MATCHES = "All metrics that match";
export const SECTIONS = [MATCHES, YOURS, "Learning", "Policy", "Rollouts", "Speed and system"];

const GIB = 2 ** 30;
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

/** A curve for each role of `of` a worker's usage, all its workers together, or the `worst` of them. */
function used(of, more = { sum: true }) {
	const value = (sample) => (sample.usage ? of(sample.usage) : null);
	return ({ rolesWith }) => rolesWith(value).map((role) => gauge(role, value, { role, ...more }));
}

const ofGpus = (of) => ({ gpus }) => (gpus?.length ? of(gpus) : null);

export const PANELS = [
	{ id: "reward", section: "Learning", title: "Reward", note: "Mean train reward of each batch, by environment.", wide: true, series: scoped("reward") },
	{
		id: "eval", section: "Learning",
		title: "Eval reward",
		note: "Mean reward of each eval; the legend names the policy versions that served it.",
		points: true,
		series: ({ evalEnvs }) => evalEnvs.map((env) => ({ from: "evals", env, label: env })),
	},
	{ id: "own", section: "Learning", title: "The environment's own metrics", note: "Metrics that environments report for their rollouts, averaged over a batch.", series: own },
	{ id: "entropy", section: "Policy", title: "Entropy", note: "Of the policy at its sampled tokens, nats.", series: scoped("entropy") },
	{
		id: "mismatch", section: "Policy",
		title: "Mismatch KL",
		note: "How far the trainer's log-probabilities are from the engine's, nats.",
		series: together(scoped("mismatch_kl"), those(["mismatch_kl/all/max", "max"])),
	},
	{ id: "grad", section: "Policy", title: "Gradient norm", note: "Before clipping.", series: either("norm", "optim/grad_norm", "grad_norm") },
	{
		id: "lengths", section: "Policy",
		title: "Lengths",
		note: "Tokens per rollout: sampled by the policy, and in total.",
		unit: "tokens",
		series: those(["decode_len/all/mean", "sampled"], ["decode_len/all/max", "sampled, max"], ["seq_len/all/mean", "all"]),
	},
	{ id: "truncation", section: "Policy", title: "Truncation", note: "Share of rollouts cut off at a limit.", share: true, series: scoped("is_truncated") },
	{ id: "errors", section: "Rollouts", title: "Error rate", note: "Share of rollouts that failed, whether or not they are in a batch.", share: true, series: (known) => (known.names.has("errors/all/rate") ? scoped("errors", { statistic: "rate" }) : scoped("errored"))(known) },
	{ id: "dropped", section: "Rollouts", title: "Dropped groups", note: "Groups with nothing to train on.", zero: true, series: scoped("dropped", { statistic: "groups" }) },
	{
		id: "staleness", section: "Rollouts",
		title: "Staleness",
		note: "Versions between the policy that sampled a batch and the one trained on it.",
		unit: "versions",
		zero: true,
		series: those(["staleness/mean", "mean"], ["staleness/max", "max"], ["off_policy/max", "off-policy, max"]),
	},
	{
		id: "drops", section: "Rollouts",
		title: "Drops",
		note: "Groups dropped because they were too old.",
		zero: true,
		series: those(["off_policy/dropped/in_flight", "too old in flight"], ["off_policy/dropped/in_queue", "too old in queue"]),
	},
	{
		id: "filtered",
		section: "Rollouts",
		title: "Filtered",
		note: "Share of rollouts that filters removed.",
		share: true,
		series: those(["pre_filters/all/dropped_rate", "pre-batch filters"], ["filters/all/is_filtered", "filters"]),
	},
	{
		id: "variance", section: "Learning",
		title: "Without signal",
		note: "Share of the batch's rollouts with advantage 0, of its groups without any reward, and of its groups in which every rollout earned 1.",
		share: true,
		series: those(["zero_advantage/all", "rollouts, advantage 0"], ["solve_none/all", "groups, none solved"], ["solve_all/all", "groups, all solved"]),
	},
	{
		id: "waits", section: "Speed and system",
		title: "Who waits for whom",
		note: "Seconds of each step: the trainer waits for rollouts or for their scoring, trains, the engines load the weights; and the checkpoint before it.",
		unit: "s",
		stack: true,
		series: those(["time/wait_for_batch", "trainer waits for rollouts"], ["time/scoring", "waits for scoring"], ["time/train", "trains"], ["time/sync_weights", "engines load weights"], ["time/checkpoint", "checkpoint"]),
	},
	{
		id: "pushes", section: "Speed and system",
		title: "Weight pushes",
		note: "Seconds of each push: the weights are committed, received, loaded while the engine is paused, and verified; and how long the trainer waited for it with its next batch at hand.",
		unit: "s",
		zero: true,
		series: those(["time/push/prepare", "committed"], ["time/push/receive", "received"], ["time/push/pause", "engine paused"], ["time/push/verify", "verified"], ["time/push/idle", "trainer waits"]),
	},
	{
		id: "throughput", section: "Speed and system",
		title: "Throughput",
		note: "Tokens a second: sampled by the engines, and trained on.",
		unit: "tokens/s",
		zero: true,
		series: together(() => [gauge("sampled", (g) => g.tokens_per_s, { sum: true })], those(["perf/throughput", "trained"])),
	},
	{
		id: "inflight", section: "Speed and system",
		title: "Rollouts in flight",
		note: "Train and eval rollouts in flight, and how many may be.",
		zero: true,
		series: () => [
			gauge("train", (g) => g.inflight_train),
			gauge("eval", (g) => g.inflight_eval),
			gauge("permits", (g) => g.permits),
		],
	},
	{
		id: "lag", section: "Speed and system",
		title: "Event-loop lag",
		note: "99th percentile of the event-loop lag of each role's worst worker, or for env of its worst env server, seconds.",
		unit: "s",
		zero: true,
		series: ({ roles }) => roles.map((role) => gauge(role, (g) => g.event_loop_lag?.p99, { role, worst: true })),
	},
	{
		id: "cpu", section: "Speed and system",
		title: "CPU",
		note: "Cores that the workers of each role and their servers use.",
		unit: "cores",
		zero: true,
		series: used((usage) => usage.cpu_cores),
	},
	{
		id: "ram", section: "Speed and system",
		title: "Memory",
		note: "Resident memory of the workers of each role and their servers.",
		unit: "GiB",
		zero: true,
		series: used((usage) => usage.memory_bytes / GIB),
	},
	{
		id: "gpu", section: "Speed and system",
		title: "GPU utilization",
		note: "Mean over the GPUs of each role's busiest machine.",
		share: true,
		series: used(ofGpus((gpus) => mean(gpus.map((gpu) => gpu.utilization).filter((share) => share !== null))), { worst: true }),
	},
	{
		id: "gpu-memory", section: "Speed and system",
		title: "GPU memory",
		note: "In use on the GPUs of each role's fullest machine, by any process.",
		unit: "GiB",
		zero: true,
		series: used(ofGpus((gpus) => gpus.reduce((sum, gpu) => sum + gpu.memory_bytes, 0) / GIB), { worst: true }),
	},
	{ id: "memory", section: "Speed and system", title: "Trainer memory", note: "Peak memory of the trainer's device during a step.", unit: "GiB", zero: true, series: those(["perf/peak_memory", "peak"]) },
];

/** A panel of one metric that the user picked. */
export const panelOf = (key) => ({ id: `key:${key}`, section: YOURS, title: key, note: "Picked from all metrics.", picked: true, series: those([key, key]) });

/** A panel of a metric that matches the search. */
export const matchOf = (key) => ({ ...panelOf(key), id: `match:${key}`, section: MATCHES, note: "Matches your search.", picked: false });

/** The series that a panel draws for a run, from the metrics that the run is known to have. */
export function seriesOf(panel, data) {
	return panel.series({
		names: data.nameSet ?? new Set(data.names),
		envs: data.envs,
		evalEnvs: [...new Set(data.evals.map((e) => e.env))],
		roles: data.roles,
		rolesWith: (value) => data.rolesWith(value),
	});
}

/** Metric keys that `panels` need of a run. */
export const keysOf = (panels, data) =>
	panels.flatMap((panel) => seriesOf(panel, data)).filter((s) => s.key).map((s) => s.key);
