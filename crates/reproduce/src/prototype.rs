//! The prototype's configurations, and what its configuration search was given, from the data published with it.

use glinthawk_plan::PlanError;
use glinthawk_plan::calculus::NetworkLink;

const EXPERIMENTS: &str = include_str!("../data/prototype-experiments.csv");
const EXPERIMENTS_NAME: &str = "prototype-experiments.csv";
const CLUSTERS: &str = include_str!("../data/prototype-clusters.csv");
const CLUSTERS_NAME: &str = "prototype-clusters.csv";

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

    /// Prompts in the air.
    pub fn in_air(&self) -> f64 {
        (self.flights() * self.rows) as f64
    }
}

/// Nodes as the paper's search was told about them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Nodes {
    pub memory_gib: f64,
    pub link: NetworkLink,
}

fn not_a_number(path: &str, line: usize, field: &str, text: &str) -> PlanError {
    PlanError::Line {
        path: path.to_owned(),
        line,
        field: field.to_owned(),
        problem: format!("`{text}` is not a number"),
    }
}

/// All experiments on the 70B model.
pub(crate) fn experiments() -> Result<Vec<Experiment>, PlanError> {
    let mut found = Vec::new();
    for (index, line) in EXPERIMENTS.lines().enumerate().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |column: usize, field: &str| -> Result<usize, PlanError> {
            let text = fields.get(column).copied().unwrap_or("");
            text.parse().map_err(|_| not_a_number(EXPERIMENTS_NAME, index + 1, field, text))
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

/// What the search was given for a tier of a cluster, say tier 2 of `double_h100_t4`, at the natural round trip.
pub(crate) fn nodes(cluster: &str, tier: usize) -> Result<Nodes, PlanError> {
    let header: Vec<&str> = CLUSTERS.lines().next().unwrap_or("").split(',').collect();
    let mut lines = CLUSTERS.lines().enumerate().skip(1).map(|(index, line)| {
        let fields: Vec<&str> = line.split(',').collect();
        (index + 1, fields)
    });
    let wanted = |fields: &[&str]| fields[0] == cluster && ["2ms", "single"].contains(&fields[1]);
    let (line, fields) = lines.find(|(_, fields)| wanted(fields)).ok_or_else(|| {
        PlanError::field(CLUSTERS_NAME, "cluster", format!("`{cluster}` is not in the data"))
    })?;
    let number = |what: &str| -> Result<f64, PlanError> {
        let field = format!("tier_{tier}_{what}");
        let column = header.iter().position(|name| *name == field);
        let text = column.and_then(|column| fields.get(column)).copied().unwrap_or("");
        text.parse().map_err(|_| not_a_number(CLUSTERS_NAME, line, &field, text))
    };
    Ok(Nodes {
        memory_gib: number("mem_GiB")?,
        link: NetworkLink::new(number("rtt_ms")?, number("cap_Gbps")?),
    })
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

    #[test]
    fn what_the_search_was_given_parses() {
        for (cluster, tier, memory_gib, rtt_ms, gbps) in [
            ("single_t4", 1, 15.0, 1.0, 8.0),
            ("double_h100_t4", 1, 80.0, 0.0, 300.0),
            ("double_h100_t4", 2, 16.0, 0.0, 300.0),
            ("double_t4_amd64", 2, 110.0, 2.0, 8.0),
        ] {
            let expected = Nodes { memory_gib, link: NetworkLink::new(rtt_ms, gbps) };
            assert_eq!(nodes(cluster, tier).expect("in the data"), expected, "{cluster} {tier}");
        }
        let message = nodes("double_tpu_t4", 1).unwrap_err().to_string();
        assert!(message.contains("double_tpu_t4"), "{message}");
        let message = nodes("single_t4", 2).unwrap_err().to_string();
        assert!(message.contains("tier_2_mem_GiB"), "{message}");
    }
}
