//! Random weights of well-known shapes.

use crate::support::identity;
use glinthawk_model::{LayerTensor, Model, ModelConfig, Tensor};
use half::bf16;

#[test]
fn shapes_have_the_published_number_of_parameters() {
    for (name, parameters, context_bytes) in [
        ("smollm2-135m", 134_515_008, 23_040),
        ("llama2-7b", 6_738_415_616, 524_288),
        ("llama2-13b", 13_015_864_320, 819_200),
        ("llama2-70b", 68_976_648_192, 327_680),
        ("llama3-8b", 8_030_261_248, 131_072),
        ("llama3-70b", 70_553_706_496, 327_680),
        ("llama3-405b", 405_853_388_800, 516_096),
    ] {
        let config = ModelConfig::shape(name).unwrap();
        assert_eq!(config.parameter_count(), parameters, "{name}");
        assert_eq!(config.context_bytes_per_token(), context_bytes, "{name}");
    }
}

#[test]
fn an_unknown_shape_lists_the_known_ones() {
    let error = Model::dummy("llama9-9b").unwrap_err().to_string();
    assert!(error.contains("llama9-9b") && error.contains("tiny, smollm2-135m"), "{error}");
}

#[test]
fn rows_are_the_same_however_they_are_asked_for() {
    let model = Model::dummy("llama3-405b").unwrap();
    let tensor = Tensor::Layer(100, LayerTensor::Up);
    let (_, inputs) = tensor.shape(model.config());
    let mut together = vec![bf16::ZERO; 3 * inputs];
    model.read_rows(tensor, 50_000..50_003, &mut together).unwrap();
    let mut single = vec![bf16::ZERO; inputs];
    model.read_rows(tensor, 50_001..50_002, &mut single).unwrap();
    assert_eq!(single, together[inputs..2 * inputs]);
    assert_ne!(single, together[..inputs]);
    let mut other = vec![bf16::ZERO; inputs];
    model.read_rows(Tensor::Layer(101, LayerTensor::Up), 50_001..50_002, &mut other).unwrap();
    assert_ne!(single, other);
    let identity = |shape| identity(&Model::dummy(shape).unwrap());
    assert_eq!(identity("llama3-405b"), identity("llama3-405b"));
    assert_ne!(identity("llama3-70b"), identity("llama3-405b"));
}

#[test]
fn values_keep_activations_sane() {
    for shape in ["tiny", "smollm2-135m", "llama2-7b"] {
        let model = Model::dummy(shape).unwrap();
        let tensor = Tensor::Layer(1, LayerTensor::Down);
        let (_, inputs) = tensor.shape(model.config());
        let mut values = vec![bf16::ZERO; 32 * inputs];
        model.read_rows(tensor, 16..48, &mut values).unwrap();
        let values: Vec<f64> = values.into_iter().map(f64::from).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
        let scale = square.sqrt() * (inputs as f64).sqrt();
        assert!((0.7..1.42).contains(&scale), "{shape}: {scale}");
        assert!(mean.abs() < 0.05 * square.sqrt(), "{shape}: {mean}");
    }
}

#[test]
fn norms_are_near_one_and_a_tied_classifier_is_the_embedding() {
    let model = Model::dummy("smollm2-135m").unwrap();
    let norm = model.read_vector(Tensor::FinalNorm).unwrap();
    assert_eq!(norm.len(), 576);
    assert!(norm.iter().all(|value| (value - 1.0).abs() < 0.07));
    let mut embedding = vec![bf16::ZERO; 576];
    let mut classifier = embedding.clone();
    model.read_rows(Tensor::Embedding, 77..78, &mut embedding).unwrap();
    model.read_rows(Tensor::Classifier, 77..78, &mut classifier).unwrap();
    assert_eq!(embedding, classifier);
}

#[test]
fn models_can_be_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Model>();
}
