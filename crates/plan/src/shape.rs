//! The few numbers of a model that decide memory, arithmetic and traffic; no weights, no kernels.

use glinthawk_model::{ModelConfig, even_slices};
use glinthawk_protocol::PAGE_POSITIONS;

/// Bytes in a GiB.
pub const GIB: f64 = (1u64 << 30) as f64;
/// Bytes in a MiB.
pub const MIB: f64 = (1u64 << 20) as f64;

/// A model's dimensions, in the paper's letters: N layers of width D, keys of width D_kv, feed-forward D_h.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Name for reports.
    pub name: String,
    /// Layers (N).
    pub layers: usize,
    /// Activation width (D).
    pub hidden: usize,
    /// Width of the queries and of the attention output; D in most models.
    pub query_width: usize,
    /// Width of the keys, and of the values (D_kv).
    pub kv_width: usize,
    /// Feed-forward width (D_h).
    pub feed_forward: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// The classifier is the embedding table.
    pub tied_embeddings: bool,
    /// Bytes of one weight, activation or context value: 2 for f16 and bf16.
    pub value_bytes: usize,
    /// Longest context the model was made for.
    pub context_max: usize,
}

impl Shape {
    /// The shape of `config`, in a two-byte type.
    pub fn of(name: &str, config: &ModelConfig) -> Self {
        Self {
            name: name.to_owned(),
            layers: config.layers,
            hidden: config.hidden,
            query_width: config.query_width(),
            kv_width: config.kv_width(),
            feed_forward: config.feed_forward,
            vocab: config.vocab,
            tied_embeddings: config.tied_embeddings,
            value_bytes: 2,
            context_max: config.context_max,
        }
    }

    /// The paper's running example.
    pub fn llama2_70b() -> Self {
        let config = ModelConfig::shape("llama2-70b").expect("a well-known shape");
        Self::of("llama2-70b", &config)
    }

    /// Parameters of the projections before attention: D(D_q + 2 D_kv).
    pub fn pre_parameters(&self) -> f64 {
        (self.hidden * (self.query_width + 2 * self.kv_width)) as f64
    }

    /// Parameters of the output projection and the feed-forward: D(D_q + 3 D_h).
    pub fn post_parameters(&self) -> f64 {
        (self.hidden * (self.query_width + 3 * self.feed_forward)) as f64
    }

    /// Parameters of the classifier.
    pub fn classify_parameters(&self) -> f64 {
        (self.vocab * self.hidden) as f64
    }

    /// Bytes of one layer's weights.
    pub fn layer_bytes(&self) -> f64 {
        (self.pre_parameters() + self.post_parameters()) * self.value_bytes as f64
    }

    /// Bytes of the embedding table, and of an untied classifier.
    pub fn table_bytes(&self) -> f64 {
        self.classify_parameters() * self.value_bytes as f64
    }

    /// Bytes of weights a slice of `layers` layers holds; the first also embeds, the last also classifies.
    pub fn slice_bytes(&self, layers: usize, first: bool, last: bool) -> f64 {
        let tables = match (first, last) {
            (true, true) if self.tied_embeddings => 1.0,
            (true, true) => 2.0,
            (true, false) | (false, true) => 1.0,
            (false, false) => 0.0,
        };
        layers as f64 * self.layer_bytes() + tables * self.table_bytes()
    }

    /// Bytes of weights that the fullest of `nodes` nodes holds.
    pub fn heaviest_slice(&self, nodes: usize) -> f64 {
        let slices = even_slices(self.layers, nodes).into_iter().enumerate();
        let bytes =
            slices.map(|(index, layers)| self.slice_bytes(layers, index == 0, index + 1 == nodes));
        bytes.fold(0.0, f64::max)
    }

    /// What it takes to hold the weights on nodes of so much memory, in words.
    pub fn nodes_needed(&self, memory: f64) -> String {
        match (1..=self.layers).find(|&nodes| self.heaviest_slice(nodes) <= memory) {
            Some(nodes) => format!("{nodes} such nodes would hold it"),
            None => {
                "no number of such nodes holds it: one layer with its table is larger".to_owned()
            }
        }
    }

    /// Bytes of all weights on one node.
    pub fn model_bytes(&self) -> f64 {
        self.slice_bytes(self.layers, true, true)
    }

    /// Positions of context that are as many bytes as the layers' weights.
    pub fn weights_positions(&self) -> u64 {
        ((self.layer_bytes() / self.context_bytes_per_layer()) as u64).max(1)
    }

    /// Context bytes of one token in one layer: a key and a value.
    pub fn context_bytes_per_layer(&self) -> f64 {
        (2 * self.kv_width * self.value_bytes) as f64
    }

    /// Bytes of a page over so many layers.
    pub fn page_bytes(&self, layers: usize) -> f64 {
        f64::from(PAGE_POSITIONS) * layers as f64 * self.context_bytes_per_layer()
    }

    /// Context bytes of one token in all layers.
    pub fn context_bytes_per_token(&self) -> f64 {
        self.layers as f64 * self.context_bytes_per_layer()
    }

    /// Floating-point operations of one row attending to `context` positions of one layer: 4 S D.
    pub fn attention_flops(&self, context: f64) -> f64 {
        4.0 * context * self.query_width as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama2_70b_layer_is_1632_mib() {
        assert_eq!(Shape::llama2_70b().layer_bytes() / MIB, 1632.0);
    }
}
