//! Cluster descriptions: the TOML a user writes, checked and resolved against catalogue and profiles.

use crate::calculus::NetworkLink;
use crate::catalogue::{Catalogue, DeviceKind};
use crate::error::{PlanError, read_text};
use crate::kernels::KernelTimes;
use crate::profile::Profile;
use crate::shape::{GIB, Shape};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Identical machines.
#[derive(Clone, Debug)]
pub struct DevicePool {
    /// Catalogue name, or the profile's machine.
    pub name: String,
    /// How long its kernels take.
    pub kernels: Arc<KernelTimes>,
    /// How many there are.
    pub nodes: usize,
    /// Bytes for weights and contexts on each.
    pub memory: f64,
    /// Its network: to the next slice for Tier 1, the node's own link for Tier 2.
    pub link: NetworkLink,
    /// Price of one node.
    pub price_usd: Option<f64>,
    /// Rent of one node.
    pub usd_per_hour: Option<f64>,
}

/// What there is to run on.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Machines for weights.
    pub tier1: DevicePool,
    /// Machines for contexts, by kind; a plan uses one kind.
    pub tier2: Vec<DevicePool>,
    /// Between the tiers, at the Tier-1 node's end.
    pub inter: NetworkLink,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    tier1: PoolFile,
    #[serde(default)]
    tier2: Vec<PoolFile>,
    inter_tier: Option<LinkFile>,
    #[serde(default)]
    device: Vec<DeviceKind>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolFile {
    device: Option<String>,
    profile: Option<PathBuf>,
    nodes: usize,
    memory_gib: Option<f64>,
    bandwidth_gbps: f64,
    rtt_ms: f64,
    price_usd: Option<f64>,
    usd_per_hour: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkFile {
    bandwidth_gbps: f64,
    rtt_ms: f64,
}

impl Cluster {
    /// Reads a cluster file for a model of `shape`; profiles are looked up beside the file.
    pub fn read(path: &Path, shape: &Shape) -> Result<Self, PlanError> {
        let folder = path.parent().unwrap_or(Path::new("."));
        Self::parse(&path.display().to_string(), &read_text(path)?, folder, shape)
    }

    /// Parses a cluster file; `path` is for messages, `folder` is where profiles are.
    pub fn parse(path: &str, text: &str, folder: &Path, shape: &Shape) -> Result<Self, PlanError> {
        let syntax = |error: toml::de::Error| PlanError::Syntax {
            path: path.to_owned(),
            message: error.to_string(),
        };
        let table: toml::Table = text.parse().map_err(syntax)?;
        if table.get("tier1").is_some_and(toml::Value::is_array) {
            let problem = "is one pool of equal nodes: write [tier1], not [[tier1]]";
            return Err(PlanError::field(path, "tier1", problem));
        }
        let file: ClusterFile = toml::from_str(text).map_err(syntax)?;
        let mut catalogue = Catalogue::built_in();
        file.device.iter().try_for_each(|device| device.check(path))?;
        catalogue.extend(file.device);
        let resolver = Resolver { path, folder, shape, catalogue: &catalogue };
        let tier1 = resolver.pool("tier1", &file.tier1)?;
        let tier2 = file.tier2.iter().enumerate();
        let tier2 = tier2
            .map(|(index, pool)| resolver.pool(&format!("tier2[{index}]"), pool))
            .collect::<Result<Vec<_>, _>>()?;
        let inter = match &file.inter_tier {
            Some(link) => resolver.link("inter_tier", link.bandwidth_gbps, link.rtt_ms)?,
            None => tier1.link,
        };
        Ok(Self { tier1, tier2, inter })
    }
}

struct Resolver<'a> {
    path: &'a str,
    folder: &'a Path,
    shape: &'a Shape,
    catalogue: &'a Catalogue,
}

impl Resolver<'_> {
    fn error(&self, field: String, problem: String) -> PlanError {
        PlanError::field(self.path, field, problem)
    }

    fn positive(&self, field: String, value: f64) -> Result<f64, PlanError> {
        if value.is_finite() && value > 0.0 {
            return Ok(value);
        }
        Err(self.error(field, format!("must be above 0, is {value}")))
    }

    fn link(&self, at: &str, gbps: f64, rtt_ms: f64) -> Result<NetworkLink, PlanError> {
        self.positive(format!("{at}.bandwidth_gbps"), gbps)?;
        if !(rtt_ms.is_finite() && rtt_ms >= 0.0) {
            return Err(
                self.error(format!("{at}.rtt_ms"), format!("must not be negative, is {rtt_ms}"))
            );
        }
        Ok(NetworkLink::new(rtt_ms, gbps))
    }

    fn pool(&self, at: &str, pool: &PoolFile) -> Result<DevicePool, PlanError> {
        if pool.nodes == 0 {
            return Err(self.error(format!("{at}.nodes"), "must be at least 1".to_owned()));
        }
        for (field, value) in [("price_usd", pool.price_usd), ("usd_per_hour", pool.usd_per_hour)] {
            if value.is_some_and(|value| !(value.is_finite() && value >= 0.0)) {
                return Err(self.error(format!("{at}.{field}"), "must not be negative".to_owned()));
            }
        }
        let (name, kernels, memory_gib, price_usd) = match (&pool.device, &pool.profile) {
            (Some(name), None) => self.in_catalogue(at, name, pool)?,
            (None, Some(profile)) => self.by_profile(at, profile, pool)?,
            _ => {
                let problem =
                    "needs either `device` (a catalogue name) or `profile` (a file)".to_owned();
                return Err(self.error(at.to_owned(), problem));
            }
        };
        Ok(DevicePool {
            name,
            kernels: Arc::new(kernels),
            nodes: pool.nodes,
            memory: self.positive(format!("{at}.memory_gib"), memory_gib)? * GIB,
            link: self.link(at, pool.bandwidth_gbps, pool.rtt_ms)?,
            price_usd,
            usd_per_hour: pool.usd_per_hour,
        })
    }

    fn in_catalogue(
        &self,
        at: &str,
        name: &str,
        pool: &PoolFile,
    ) -> Result<(String, KernelTimes, f64, Option<f64>), PlanError> {
        let device = self.catalogue.get(name).ok_or_else(|| {
            let problem = format!("`{name}` is not in the catalogue ({})", self.catalogue.names());
            self.error(format!("{at}.device"), problem)
        })?;
        let price = pool.price_usd.or(device.price_usd.as_ref().map(|figure| figure.value));
        let memory = pool.memory_gib.unwrap_or(device.memory_gib.value);
        Ok((name.to_owned(), KernelTimes::analytic(device, self.shape), memory, price))
    }

    fn by_profile(
        &self,
        at: &str,
        path: &Path,
        pool: &PoolFile,
    ) -> Result<(String, KernelTimes, f64, Option<f64>), PlanError> {
        let profile = Profile::read(&self.folder.join(path))?;
        profile.check_shape(&self.folder.join(path).display().to_string(), self.shape)?;
        let memory = pool.memory_gib.ok_or_else(|| {
            self.error(
                format!("{at}.memory_gib"),
                "is required with a profile, which does not know it".to_owned(),
            )
        })?;
        let name = profile.provenance.machine.clone();
        Ok((name, KernelTimes::Measured(Box::new(profile)), memory, pool.price_usd))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[tier1]
device = "t4"
nodes = 80
memory_gib = 15.0
bandwidth_gbps = 8
rtt_ms = 2

[[tier2]]
device = "epyc-7v12-16"
nodes = 80
bandwidth_gbps = 8
rtt_ms = 2

[inter_tier]
bandwidth_gbps = 8
rtt_ms = 2
"#;

    fn parse(text: &str) -> Result<Cluster, PlanError> {
        Cluster::parse("c.toml", text, Path::new("."), &Shape::llama2_70b())
    }

    #[test]
    fn resolves_against_the_catalogue() {
        let cluster = parse(GOOD).expect("valid");
        assert_eq!((cluster.tier1.nodes, cluster.tier1.memory), (80, 15.0 * GIB));
        assert_eq!(cluster.tier2[0].memory, 110.0 * GIB);
        assert_eq!(cluster.tier1.price_usd, Some(1780.0));
        assert_eq!(cluster.inter, NetworkLink::new(2.0, 8.0));
    }

    #[test]
    fn bad_files_name_the_field() {
        let cases = [
            ("nodes = 80\nmemory", "nodes = 0\nmemory", "c.toml: tier1.nodes: must be at least 1"),
            (
                "device = \"t4\"",
                "device = \"t5\"",
                "c.toml: tier1.device: `t5` is not in the catalogue",
            ),
            ("device = \"t4\"", "", "c.toml: tier1: needs either `device`"),
            (
                "memory_gib = 15.0",
                "memory_gib = -1.0",
                "c.toml: tier1.memory_gib: must be above 0, is -1",
            ),
            (
                "bandwidth_gbps = 8\nrtt_ms = 2\n\n[inter",
                "bandwidth_gbps = 0\nrtt_ms = 2\n\n[inter",
                "c.toml: tier2[0].bandwidth_gbps: must be",
            ),
            (
                "[inter_tier]\nbandwidth_gbps = 8\nrtt_ms = 2",
                "[inter_tier]\nbandwidth_gbps = 8\nrtt_ms = -2",
                "c.toml: inter_tier.rtt_ms: must not be negative",
            ),
            (
                "[tier1]",
                "[[tier1]]",
                "c.toml: tier1: is one pool of equal nodes: write [tier1], not [[tier1]]",
            ),
            (
                "memory_gib = 15.0",
                "usd_per_hour = -3",
                "c.toml: tier1.usd_per_hour: must not be negative",
            ),
        ];
        for (good, bad, expected) in cases {
            let error = parse(&GOOD.replacen(good, bad, 1)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        for (good, bad, named) in [
            ("nodes = 80", "nods = 80", "nods"),
            ("nodes = 80", "nodes = \"many\"", "nodes"),
            ("rtt_ms = 2", "", "rtt_ms"),
        ] {
            let error = parse(&GOOD.replacen(good, bad, 1)).unwrap_err().to_string();
            assert!(error.starts_with("c.toml: ") && error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_profile_must_match_the_model_and_come_with_memory() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        crate::profile::tests::linear(1e-3, 1e-5)
            .write(&folder.path().join("p.json"))
            .expect("written");
        let text = "[tier1]\nprofile = \"p.json\"\nnodes = 1\nbandwidth_gbps = 1\nrtt_ms = 0\n";
        let mut shape = Shape {
            hidden: 8,
            query_width: 8,
            kv_width: 8,
            feed_forward: 8,
            vocab: 8,
            ..Shape::llama2_70b()
        };
        let parse =
            |text: &str, shape: &Shape| Cluster::parse("c.toml", text, folder.path(), shape);
        let error = parse(text, &shape).unwrap_err().to_string();
        assert!(error.starts_with("c.toml: tier1.memory_gib: is required"), "{error}");
        assert!(parse(&format!("{text}memory_gib = 4\n"), &shape).is_ok());
        shape.hidden = 16;
        let error = parse(text, &shape).unwrap_err().to_string();
        assert!(error.contains("p.json: shape: was measured for test"), "{error}");
    }
}
