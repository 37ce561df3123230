//! The prototype's configurations, from the data that was published with it.

use crate::error::PlanError;

const EXPERIMENTS: &str = include_str!("../../data/prototype-experiments.csv");
const NAME: &str = "prototype-experiments.csv";

/// One configuration the prototype was run with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Experiment {
    pub group: String,
    pub name: String,
    pub tier1: usize,
    pub tier2: usize,
    pub rows: usize,
    /// Rows per Tier-2 node.
    pub batch: usize,
    /// Prompts seated on each node that holds contexts.
    pub contexts: usize,
    pub induced_ms: f64,
}

impl Experiment {
    /// Flights in the air: seats over rows.
    pub fn flights(&self) -> usize {
        self.contexts / if self.tier2 == 0 { self.rows } else { self.batch }
    }
}

/// All experiments on the 70B model.
pub(crate) fn experiments() -> Result<Vec<Experiment>, PlanError> {
    let mut found = Vec::new();
    for (index, line) in EXPERIMENTS.lines().enumerate().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |column: usize, field: &str| -> Result<usize, PlanError> {
            let text = fields.get(column).copied().unwrap_or("");
            text.parse().map_err(|_| PlanError::Line {
                path: NAME.to_owned(),
                line: index + 1,
                field: field.to_owned(),
                problem: format!("`{text}` is not a whole number"),
            })
        };
        if !fields.get(2).is_some_and(|model| model.starts_with("llama2-70b")) {
            continue;
        }
        let (tier2, rows) = (number(5, "tier2_per_tier1")?, number(6, "tier1_batch")?);
        found.push(Experiment {
            group: fields[0].to_owned(),
            name: fields[1].to_owned(),
            tier1: number(4, "tier1_nodes")?,
            tier2,
            rows,
            batch: number(8, "attention_rows_per_tier2")?,
            contexts: if tier2 == 0 {
                number(9, "contexts_per_tier1")?
            } else {
                number(10, "contexts_per_tier2")?
            },
            induced_ms: fields.get(11).and_then(|text| text.parse().ok()).unwrap_or(0.0),
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prototypes_configurations_parse() {
        let all = experiments().expect("the built-in data is good");
        let best = all
            .iter()
            .find(|experiment| experiment.name.ends_with("16xT4_48xCPU_B246"))
            .expect("in the data");
        assert_eq!((best.tier1, best.tier2, best.batch, best.flights()), (16, 3, 82, 50));
        assert!(all.iter().all(|experiment| experiment.flights() > 0));
    }
}
