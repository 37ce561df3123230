//! Trials, and which of them are worth their cost.

use super::objective::compare;
use crate::candidate::Candidate;
use crate::forecast::Forecast;
use crate::plan::Plan;

/// The front's resolution: a configuration must be faster than the cheaper ones by this factor to be on it.
pub const FRONT_STEP: f64 = 1.05;

/// A configuration whose job was forecast.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The configuration.
    pub candidate: Candidate,
    /// The plan to run it.
    pub plan: Plan,
    /// What its job takes.
    pub forecast: Forecast,
    /// Cost of its nodes.
    pub cost: f64,
    /// What the job costs: dollars where there is a rent, else the nodes' price or number.
    pub spend: f64,
    /// Whether the forecast was made roughly, with several layers as one.
    pub is_rough: bool,
}

impl Trial {
    /// From the first prompt to the last token.
    pub fn seconds(&self) -> f64 {
        self.forecast.seconds
    }
}

/// Whether a configuration that takes at least `seconds` and `spend` cannot be on the front, nor dominate what is on
/// it: something found is as cheap and as fast, or cheaper and less than a step slower.
pub(super) fn is_covered(trials: &[Trial], seconds: f64, spend: f64) -> bool {
    trials.iter().any(|found| {
        (found.spend <= spend && found.seconds() <= seconds)
            || (found.spend < spend && found.seconds() <= FRONT_STEP * seconds)
    })
}

/// The front of job time against its cost: from the cheapest on, whatever is faster than all cheaper ones by
/// [`FRONT_STEP`]; and `best`, which no other beats in both.
pub fn front<'a>(trials: &'a [Trial], best: &'a Trial) -> Vec<&'a Trial> {
    let mut listed: Vec<&Trial> = Vec::new();
    let mut sorted: Vec<&Trial> = trials.iter().collect();
    sorted
        .sort_by(|one, other| compare((one.spend, one.seconds()), (other.spend, other.seconds())));
    for trial in sorted {
        if listed.last().is_none_or(|last| FRONT_STEP * trial.seconds() < last.seconds()) {
            listed.push(trial);
        }
    }
    if !listed.iter().any(|trial| trial.candidate == best.candidate) {
        let place = listed.partition_point(|trial| trial.spend <= best.spend);
        listed.insert(place, best);
    }
    listed
}
