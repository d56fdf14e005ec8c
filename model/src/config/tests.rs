//! Hyperparameters from texts; files are tested in `tests/network`.

use std::path::Path;

use keepsake_kernels::RopeScaling;

use super::{DummyShape, HParams};
use crate::arch::Architecture;

fn parse(extra: &str) -> HParams {
    let text = format!(
        r#"{{"architectures": ["MistralForCausalLM"], "vocab_size": 100, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4{extra}}}"#
    );
    HParams::from_config_json(Path::new("config.json"), &text).unwrap()
}

#[test]
fn absent_fields_take_the_defaults_of_transformers() {
    let hparams = parse("");
    assert_eq!((hparams.num_kv_heads, hparams.head_dim), (4, 16));
    assert_eq!((hparams.query_dim(), hparams.kv_dim()), (64, 64));
    assert_eq!(hparams.max_context, 2048);
    assert_eq!(hparams.rope_theta, 10_000.0);
    assert_eq!(hparams.rope_scaling, RopeScaling::None);
    assert_eq!(hparams.rms_eps, 1e-6);
    assert!(!hparams.tied_embeddings);
}

#[test]
fn a_sliding_window_limits_the_context() {
    let hparams = parse(r#", "max_position_embeddings": 32768, "sliding_window": 4096"#);
    assert_eq!(hparams.max_context, 4096);
    let hparams = parse(r#", "max_position_embeddings": 32768, "sliding_window": null"#);
    assert_eq!(hparams.max_context, 32768);
}

#[test]
fn rope_parameters_are_read_from_either_place() {
    let hparams = parse(r#", "rope_theta": 500000.0, "rope_scaling": null"#);
    assert_eq!(hparams.rope_theta, 500_000.0);
    let hparams = parse(r#", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}"#);
    assert_eq!(hparams.rope_theta, 1e6);
    assert_eq!(hparams.rope_scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn every_named_shape_is_valid() {
    for name in DummyShape::names() {
        let shape = DummyShape::parse(&format!("{name}:bf16")).unwrap();
        assert_eq!(shape.hparams.arch == Architecture::Opt, name.contains("opt"), "{name}");
    }
    let message = DummyShape::parse("tiny:q2").unwrap_err().to_string();
    assert_eq!(message, "dummy weight type `q2` is not supported (supported: q4_1, bf16)");
}

#[test]
fn the_other_architectures_are_read() {
    let common = r#""vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 1024"#;
    let read = |text: String| HParams::from_config_json(Path::new("config.json"), &text);
    let gated = format!(r#"{common}, "intermediate_size": 512, "num_key_value_heads": 2, "sliding_window": 64"#);

    let qwen2 = format!(r#"{{"architectures": ["Qwen2ForCausalLM"], {gated}, "use_sliding_window": false}}"#);
    let qwen2 = read(qwen2).unwrap();
    assert_eq!((qwen2.arch, qwen2.max_context), (Architecture::Qwen2, 1024));

    let qwen3 = format!(r#"{{"architectures": ["Qwen3ForCausalLM"], {gated}, "head_dim": 128}}"#);
    let qwen3 = read(qwen3).unwrap();
    assert_eq!((qwen3.arch, qwen3.head_dim, qwen3.max_context), (Architecture::Qwen3, 128, 64));

    let opt = |more: &str| read(format!(r#"{{"architectures": ["OPTForCausalLM"], {common}, "ffn_dim": 1024{more}}}"#));
    let small = opt("").unwrap();
    assert_eq!((small.arch, small.ffn, small.num_kv_heads), (Architecture::Opt, 1024, 4));
    assert!(small.tied_embeddings);
    for (field, message) in [
        (r#", "do_layer_norm_before": false"#, "do_layer_norm_before"),
        (r#", "word_embed_proj_dim": 128"#, "word_embed_proj_dim"),
        (r#", "activation_function": "gelu""#, "activation_function"),
    ] {
        assert!(opt(field).unwrap_err().to_string().contains(message), "{field}");
    }
}
