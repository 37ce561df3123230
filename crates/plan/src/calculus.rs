//! The closed forms of the paper's sections 2 to 4: context sizes, flights needed, largest batches, traffic.
//! Units are bytes, seconds and bits per second; nothing here is simulated.

use crate::shape::Shape;

/// What travels between the tiers for a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowTraffic {
    /// The paper's: the whole state object goes to Tier 2 and back.
    StateObject,
    /// Ours: the residual stays on the Tier-1 node; q, k, v go out, the attention output comes back.
    ResidualHome,
}

impl RowTraffic {
    /// Bytes from Tier 1 to Tier 2 for a row and layer: 2(2D + 2D_kv), or 2(D + 2D_kv).
    pub fn out_bytes(self, shape: &Shape) -> f64 {
        let residual = if self == Self::StateObject { shape.hidden } else { 0 };
        ((residual + shape.query_width + 2 * shape.kv_width) * shape.value_bytes) as f64
    }

    /// Bytes from Tier 2 to Tier 1 for a row and layer: 2(2D), or 2D.
    pub fn back_bytes(self, shape: &Shape) -> f64 {
        let residual = if self == Self::StateObject { shape.hidden } else { 0 };
        ((residual + shape.query_width) * shape.value_bytes) as f64
    }

    /// Bytes from a slice to the next for a row: 2D in the paper, an f32 residual (4D) here.
    pub fn hop_bytes(self, shape: &Shape) -> f64 {
        match self {
            Self::StateObject => (shape.hidden * shape.value_bytes) as f64,
            Self::ResidualHome => (shape.hidden * 4) as f64,
        }
    }
}

/// A link: half a round trip of pure delay, and a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkLink {
    /// Round-trip time in seconds.
    pub rtt_seconds: f64,
    /// Bytes per second, each direction.
    pub bandwidth: f64,
}

impl NetworkLink {
    /// A link of `gbps` gigabits per second and `rtt_ms` milliseconds there and back.
    pub fn new(rtt_ms: f64, gbps: f64) -> Self {
        Self { rtt_seconds: rtt_ms / 1e3, bandwidth: gbps * 1e9 / 8.0 }
    }

    /// Seconds for `bytes` one way: RTT/2 + bytes/BW.
    pub fn transit(&self, bytes: f64) -> f64 {
        self.rtt_seconds / 2.0 + bytes / self.bandwidth
    }
}

/// M: context bytes of a prompt of `tokens` tokens, 4 N S D_kv.
pub fn context_bytes(shape: &Shape, tokens: f64) -> f64 {
    shape.context_bytes_per_token() * tokens
}

/// ⌊C_max / M⌋: prompts whose contexts fit into `free_bytes`.
pub fn prompts_in(free_bytes: f64, shape: &Shape, tokens: f64) -> usize {
    (free_bytes.max(0.0) / context_bytes(shape, tokens)).floor() as usize
}

/// IF_pp = ⌈1 + K t_n / (N t_c)⌉ K: flights that keep a pipeline of K nodes busy.
pub fn flights_pipeline(nodes: usize, layers: usize, transit: f64, layer_compute: f64) -> usize {
    let exposed = nodes as f64 * transit / (layers as f64 * layer_compute);
    (1.0 + exposed).ceil() as usize * nodes
}

/// IF_pp as the paper's summary table prints it, with N and K exchanged: ⌈1 + N t_n / (K t_c)⌉ K.
pub fn flights_pipeline_as_tabled(
    nodes: usize,
    layers: usize,
    transit: f64,
    layer_compute: f64,
) -> usize {
    let exposed = layers as f64 * transit / (nodes as f64 * layer_compute);
    (1.0 + exposed).ceil() as usize * nodes
}

/// IF_tp = ⌈1 + t_n / (t_c,min / K)⌉: flights that keep K tensor-parallel nodes busy.
pub fn flights_tensor(nodes: usize, transit: f64, stage_compute: f64) -> usize {
    (1.0 + transit * nodes as f64 / stage_compute).ceil() as usize
}

/// IF_gh = ⌈1 + (t_c2,att + t_n) / t_c1,no-att⌉: flights that hide Tier 2 from a Tier-1 node.
pub fn flights_two_tier(attention: f64, transit: f64, tier1_compute: f64) -> usize {
    (1.0 + (attention + transit) / tier1_compute).ceil() as usize
}

/// t_n of a flight of `rows` rows: RTT + 2 B K' (4D + 2 D_kv) / BW for the paper's traffic.
pub fn inter_tier_transit(
    shape: &Shape,
    traffic: RowTraffic,
    link: &NetworkLink,
    rows: f64,
) -> f64 {
    link.rtt_seconds
        + rows * (traffic.out_bytes(shape) + traffic.back_bytes(shape)) / link.bandwidth
}

/// The largest batch B ≤ `limit` with B · IF(B) ≤ `prompts`; 0 if not even one row fits.
pub fn largest_batch(prompts: usize, limit: usize, flights: impl Fn(usize) -> usize) -> usize {
    (1..=limit.min(prompts)).rev().find(|&batch| batch * flights(batch) <= prompts).unwrap_or(0)
}

/// Bits per second leaving each tier, in total, at `tokens_per_second`: K ⌈N/K⌉ · bytes · T.
pub fn egress_bits(
    shape: &Shape,
    traffic: RowTraffic,
    nodes: usize,
    tokens_per_second: f64,
) -> (f64, f64) {
    let crossings = (nodes * shape.layers.div_ceil(nodes)) as f64;
    let rate = crossings * tokens_per_second * 8.0;
    (rate * traffic.out_bytes(shape), rate * traffic.back_bytes(shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{GIB, MIB};

    const LAYER_COMPUTE: f64 = 5.6e-3;
    const SMALLEST_STAGE: f64 = 0.48e-3;

    fn ethernet() -> NetworkLink {
        NetworkLink::new(2.0, 8.0)
    }

    #[test]
    fn contexts_of_section_kvc_single() {
        let shape = Shape::llama2_70b();
        assert_eq!(context_bytes(&shape, 2048.0) / MIB, 640.0);
        assert_eq!(128.0 * context_bytes(&shape, 2048.0) / GIB, 80.0);
        // The text's formula M = 2NSD_kv counts values, not bytes of a two-byte type: half of the 640 MiB it states.
        assert_eq!(2.0 * 80.0 * 2048.0 * 1024.0 / MIB, 320.0);
    }

    #[test]
    fn ten_t4_hold_32_contexts() {
        let shape = Shape::llama2_70b();
        // 14.75 GiB of a T4 are usable; eight layers take 12.75 GiB of them.
        let free = 10.0 * (14.75 * GIB - 8.0 * shape.layer_bytes());
        assert_eq!(prompts_in(free, &shape, 2048.0), 32);
    }

    #[test]
    fn pipeline_example() {
        let transit = ethernet().transit(16.0 * 1024.0);
        assert!((transit - 1.016e-3).abs() < 1e-6);
        assert_eq!(flights_pipeline(10, 80, transit, LAYER_COMPUTE), 20);
        assert_eq!(flights_pipeline(10, 80, 0.0, LAYER_COMPUTE), 10);
        assert_eq!(largest_batch(32, 4096, |_| 20), 1);
        assert_eq!(largest_batch(32, 4096, |_| 10), 3);
        // The text writes 0.022K where K t_n / (N t_c) is 0.0022K; the ceiling is 2 for both at K = 10.
        let slope = 1e-3 / (80.0 * LAYER_COMPUTE);
        assert!((slope - 0.00223).abs() < 1e-5);
        assert_eq!((1.0f64 + 10.0 * 0.022).ceil(), (1.0 + 10.0 * slope).ceil());
        // The summary table exchanges N and K: it would ask for 30 flights, not 20.
        assert_eq!(flights_pipeline_as_tabled(10, 80, transit, LAYER_COMPUTE), 30);
    }

    #[test]
    fn tensor_example() {
        // The text rounds t_n to 1 ms before it multiplies: 22 flights. Unrounded it is 1.016 ms: 23.
        assert_eq!(flights_tensor(10, 1e-3, SMALLEST_STAGE), 22);
        assert_eq!(flights_tensor(10, ethernet().transit(16.0 * 1024.0), SMALLEST_STAGE), 23);
        assert!((1e-3 / SMALLEST_STAGE - 2.08).abs() < 0.005);
        assert_eq!(largest_batch(32, 4096, |_| 22), 1);
        assert_eq!(largest_batch(32, 4096, |_| flights_tensor(10, 0.0, SMALLEST_STAGE)), 32);
    }

    #[test]
    fn two_tier_flights_fall_to_two_when_tier_1_hides_everything() {
        assert_eq!(flights_two_tier(5e-3, 5e-3, 10e-3), 2);
        assert_eq!(flights_two_tier(5e-3, 5.1e-3, 10e-3), 3);
    }

    #[test]
    fn egress_of_the_empirical_rows_follows_from_their_throughput() {
        let shape = Shape::llama2_70b();
        for (nodes, rate, tier1, tier2) in [
            (9, 1096.0, 26.2, 23.3),
            (16, 1138.0, 26.9, 23.9),
            (16, 1557.0, 36.7, 32.7),
            (16, 1992.0, 47.0, 41.8),
        ] {
            let (out, back) = egress_bits(&shape, RowTraffic::StateObject, nodes, rate);
            assert!((out / 1e9 - tier1).abs() < 0.06, "{nodes} nodes: {out}");
            assert!((back / 1e9 - tier2).abs() < 0.06, "{nodes} nodes: {back}");
        }
    }

    #[test]
    fn residual_at_home_saves_44_percent_of_egress() {
        let shape = Shape::llama2_70b();
        let ratio =
            RowTraffic::ResidualHome.out_bytes(&shape) / RowTraffic::StateObject.out_bytes(&shape);
        assert!((1.0 - ratio - 0.444).abs() < 0.001);
    }
}
