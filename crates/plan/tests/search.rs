//! The planner: its bound is sound, pruning changes nothing but the time, impossible clusters say what they need.

use std::path::Path;

use glinthawk_plan::{
    Bottleneck, Cluster, FRONT_STEP, Job, Objective, Plan, PlanError, Rules, Settings, Shape,
    Space, Traffic, Wish, Workload, evaluate, fewest_flights, front, propose, search, simulate,
};

fn cluster_text(tier1: (&str, usize), tier2: (&str, usize)) -> String {
    format!(
        "[tier1]\ndevice = \"{}\"\nnodes = {}\nbandwidth_gbps = 8\nrtt_ms = 2\n\
         [[tier2]]\ndevice = \"{}\"\nnodes = {}\nbandwidth_gbps = 8\nrtt_ms = 2\n\
         [inter_tier]\nbandwidth_gbps = 8\nrtt_ms = 2\n",
        tier1.0, tier1.1, tier2.0, tier2.1
    )
}

fn space(tier1: (&str, usize), tier2: (&str, usize), settings: Settings) -> Space {
    let shape = Shape::llama2_70b();
    let cluster = Cluster::parse("test", &cluster_text(tier1, tier2), Path::new("."), &shape)
        .expect("a valid cluster");
    Space::new(cluster, Job::longest(&shape, 2048.0, 3.0), settings)
}

/// Eight layers on up to 4 Tier-1 and 8 Tier-2 nodes with little memory: small enough to simulate every candidate.
fn small_space(settings: Settings) -> Space {
    let shape = Shape { layers: 8, ..Shape::llama2_70b() };
    let text = cluster_text(("t4", 4), ("epyc-7v12-16", 8))
        .replace("nodes = 8", "memory_gib = 1.0\nnodes = 8");
    let cluster = Cluster::parse("test", &text, Path::new("."), &shape).expect("a valid cluster");
    Space::new(cluster, Job::longest(&shape, 2048.0, 3.0), settings)
}

fn paper_settings(batch_max: usize) -> Settings {
    Settings {
        batch_max,
        rules: Rules::Paper,
        traffic: Traffic::StateObject,
        local_shares: vec![0.0],
        ..Settings::default()
    }
}

#[test]
fn estimate_is_the_programs_bound() {
    let listing = Settings { rules: Rules::Listing, ..paper_settings(4096) };
    for settings in [Settings::default(), paper_settings(4096), listing] {
        let space = space(("t4", 24), ("rtx6000", 70), settings);
        for site in space.sites().expect("it fits").iter().step_by(5) {
            let candidates = space.candidates(site);
            for candidate in candidates.iter().step_by(1 + candidates.len() / 5) {
                let mut short = *candidate;
                short.flights = short.flights.min(2);
                let (bound, bottleneck) = space.estimate(site, &short);
                let report = simulate(&space.configuration(site, &short));
                let ratio = bound / report.bound_tokens_per_second;
                assert!((ratio - 1.0).abs() < 1e-9, "{short:?}: {bound} against {report:?}");
                assert_eq!(bottleneck, report.bottleneck, "{short:?}");
                assert!(report.tokens_per_second <= bound * (1.0 + 1e-9));
            }
        }
    }
}

#[test]
fn pruned_and_unpruned_searches_find_the_same() {
    for settings in [paper_settings(40), Settings { batch_max: 40, ..Settings::default() }] {
        let rows = 200.0;
        for objective in
            [Objective::Throughput, Objective::Cost, Objective::Deadline { seconds: 1.0, rows }]
        {
            // A space remembers what was simulated in it: each search gets its own.
            let pruned = search(&small_space(settings.clone()), objective, true).expect("it fits");
            let whole = search(&small_space(settings.clone()), objective, false).expect("it fits");
            assert_eq!((&pruned.best, &pruned.site), (&whole.best, &whole.site), "{objective:?}");
            assert_eq!(whole.effort.simulated, whole.effort.candidates);
            let (some, all) = (pruned.effort.simulated, whole.effort.simulated);
            assert!(some * 10 < all, "{objective:?}: {some} of {all}");
        }
    }
}

#[test]
fn the_front_rises_and_holds_what_the_objectives_choose() {
    let space = small_space(paper_settings(256));
    let (points, _) = front(&space).expect("it fits");
    for pair in points.windows(2) {
        assert!(
            pair[0].cost < pair[1].cost
                && FRONT_STEP * pair[0].tokens_per_second < pair[1].tokens_per_second
        );
    }
    let best = |objective| search(&space, objective, true).expect("found").best;
    let (fastest, cheapest) = (best(Objective::Throughput), best(Objective::Cost));
    assert!(points.iter().all(|other| other.tokens_per_second <= fastest.tokens_per_second));
    assert!(points.iter().all(|other| other.cost_per_rate() >= cheapest.cost_per_rate()));
    let last = points.last().expect("not empty");
    assert!(fastest.tokens_per_second <= FRONT_STEP * last.tokens_per_second);
    let half = fastest.tokens_per_second / 2.0;
    let in_time = best(Objective::Deadline { seconds: 1.0, rows: half });
    assert!(in_time.tokens_per_second >= half && in_time.cost < fastest.cost);
    let error = search(&space, Objective::Deadline { seconds: 1.0, rows: 1e9 }, true).unwrap_err();
    assert!(
        matches!(&error, PlanError::Deadline(text) if text.contains("the cluster reaches")),
        "{error}"
    );
}

#[test]
fn fewer_flights_give_the_same_throughput() {
    let space = space(("t4", 16), ("epyc-7v12-16", 48), paper_settings(512));
    let found = search(&space, Objective::Throughput, true).expect("it fits");
    let few = fewest_flights(&space, &found.site, &found.best);
    assert!(few.tokens_per_second >= 0.999 * found.best.tokens_per_second);
    assert!(few.candidate.flights <= found.best.candidate.flights);
    assert_eq!(evaluate(&space, &found.site, &few.candidate), few);
}

#[test]
fn impossible_clusters_say_what_would_be_needed() {
    let error =
        space(("t4", 8), ("epyc-7v12-16", 8), Settings::default()).sites().unwrap_err().to_string();
    assert_eq!(
        error,
        "the model does not fit: llama2-70b has 128.5 GiB of weights; tier1 has 8 nodes of 16.0 GiB. \
         9 such nodes would hold it; with 8 nodes each needs 16.4 GiB"
    );
    let shape = Shape::llama2_70b();
    let text = "[tier1]\ndevice = \"h200\"\nnodes = 1\nbandwidth_gbps = 8\nrtt_ms = 2\nmemory_gib = 128.6\n";
    let cluster = Cluster::parse("test", text, Path::new("."), &shape).expect("valid");
    let workload = Workload::uniform(1000, 1000, 4).expect("valid");
    let space = Space::new(cluster, Job::of(&shape, &workload, 1), Settings::default());
    let error = space.sites().unwrap_err().to_string();
    assert!(
        error.starts_with("no context memory is left: ")
            && error.contains("2000 tokens) needs 0.61 GiB"),
        "{error}"
    );
}

#[test]
fn hybrid_plans_are_never_worse() {
    let remote = Settings { local_shares: vec![0.0], batch_max: 200, ..Settings::default() };
    let hybrid = Settings { local_shares: vec![0.0, 0.5, 1.0], ..remote.clone() };
    let best = |settings| {
        let space = small_space(settings);
        search(&space, Objective::Throughput, true).expect("it fits").best
    };
    let (remote, hybrid) = (best(remote), best(hybrid));
    assert!(hybrid.tokens_per_second >= remote.tokens_per_second);
    assert!(hybrid.candidate.local_rows > 0 || hybrid.bottleneck != Bottleneck::Tier2Compute);
}

#[test]
fn a_proposal_explains_itself_and_its_plan_is_valid() {
    let space = small_space(Settings { batch_max: 200, ..Settings::default() });
    let workload = Workload::uniform(100, 50, 1000).expect("valid");
    let proposal = propose(&space, Objective::Throughput, Some(&workload), 16).expect("found");
    let plan =
        Plan::parse("plan.toml", &proposal.plan.to_toml()).expect("a plan reads what it writes");
    assert_eq!(plan, proposal.plan);
    plan.check_layers("plan.toml", 8).expect("all layers are hosted");
    assert_eq!(plan.max_context, 150);
    let seconds = plan.forecast.job_seconds.expect("a workload was given");
    assert!((seconds - workload.rows() / plan.forecast.tokens_per_second).abs() < 1e-6 * seconds);
    // A batch a tenth away is not among the candidates and may be a little better than all of them.
    let better = |neighbour: &glinthawk_plan::Neighbour| {
        neighbour.evaluation.as_ref().is_some_and(|other| {
            other.cost <= proposal.best.cost
                && other.tokens_per_second > 1.02 * proposal.best.tokens_per_second
        })
    };
    assert!(
        !proposal.neighbours.iter().any(better),
        "{:?}: {:?}",
        proposal.best,
        proposal.neighbours
    );
    let text = proposal.render();
    for word in
        ["best", "limited by", "neighbours and why they lose", "front of throughput", "analytic"]
    {
        assert!(text.contains(word), "{word} in {text}");
    }
}

#[test]
fn a_wish_is_granted_or_told_what_it_lacks() {
    let space = small_space(Settings::default());
    let wish = Wish { tier1: 2, tier2: 2, pool: 0, batch: 4, local_rows: 0, flights: None };
    let (site, candidate) = space.choose(&wish).expect("it fits");
    assert_eq!(candidate.flights, site.seats_tier2 / 4);
    assert!(simulate(&space.configuration(&site, &candidate)).tokens_per_second > 0.0);
    let refused = |wish: Wish| space.choose(&wish).unwrap_err().to_string();
    let error = refused(Wish { flights: Some(10_000), ..wish });
    assert!(error.contains("10000 flights of 4 rows") && error.contains("memory seats"), "{error}");
    assert!(refused(Wish { tier2: 9, ..wish }).contains("2 Tier-1 nodes with 9 Tier-2 nodes each"));
    assert!(refused(Wish { batch: 0, ..wish }).contains("raise the batch"));
}

#[test]
fn chunked_input_needs_fewer_seats_for_the_same_rows() {
    let shape = Shape { layers: 8, ..Shape::llama2_70b() };
    let nodes = |text: String| {
        text.replace("nodes = 8", "memory_gib = 0.25\nnodes = 8")
            .replace("nodes = 4", "memory_gib = 3.8\nnodes = 4")
    };
    let workload = Workload::uniform(512, 64, 100).expect("valid");
    let best = |chunk: usize| {
        let text = nodes(cluster_text(("t4", 4), ("epyc-7v12-16", 8)));
        let cluster =
            Cluster::parse("test", &text, Path::new("."), &shape).expect("a valid cluster");
        let settings = Settings { batch_max: 256, local_shares: vec![0.0], ..Settings::default() };
        let space = Space::new(cluster, Job::of(&shape, &workload, chunk), settings);
        search(&space, Objective::Throughput, true).expect("it fits").best.tokens_per_second
    };
    assert!(best(64) > 1.2 * best(1));
}
