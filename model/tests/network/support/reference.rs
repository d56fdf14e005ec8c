//! A llama forward pass in f64, one token after another, as plainly as possible. K and V go
//! through f16, because that is how they are stored.

use half::f16;

use super::tiny::TinyModel;

/// Logits at every position.
pub fn logits(model: &TinyModel, tokens: &[u32]) -> Vec<Vec<f64>> {
    let shape = &model.shape;
    let head_dim = shape.head_dim;
    let group = shape.num_heads / shape.num_kv_heads;
    let mut keys = vec![Vec::<Vec<f64>>::new(); shape.num_layers];
    let mut values = keys.clone();
    let mut all = Vec::new();
    for (position, &token) in tokens.iter().enumerate() {
        let mut x = row(&model.embedding, token as usize, shape.hidden);
        for (layer, weights) in model.layers.iter().enumerate() {
            let normed = rms_norm(&x, &weights.attention_norm);
            let mut q = product(&weights.query, &normed);
            let mut k = product(&weights.key, &normed);
            let v = product(&weights.value, &normed);
            rotate(&mut q, head_dim, position, &model.inverse_frequencies, model.rope_amplitude);
            rotate(&mut k, head_dim, position, &model.inverse_frequencies, model.rope_amplitude);
            keys[layer].push(through_f16(&k));
            values[layer].push(through_f16(&v));
            let mut attended = Vec::new();
            for head in 0..shape.num_heads {
                let kv = head / group * head_dim;
                let query = &q[head * head_dim..(head + 1) * head_dim];
                let scores =
                    keys[layer].iter().map(|key| dot(query, &key[kv..kv + head_dim]) / (head_dim as f64).sqrt());
                let weights = softmax(scores.collect());
                for channel in 0..head_dim {
                    let past = values[layer].iter().zip(&weights);
                    attended.push(past.map(|(value, weight)| value[kv + channel] * weight).sum());
                }
            }
            add(&mut x, &product(&weights.attention_output, &attended));
            let normed = rms_norm(&x, &weights.ffn_norm);
            let gate = product(&weights.gate, &normed);
            let up = product(&weights.up, &normed);
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(&mut x, &product(&weights.down, &inner));
        }
        let normed = rms_norm(&x, &model.output_norm);
        all.push(product(model.output.as_ref().unwrap_or(&model.embedding), &normed));
    }
    all
}

fn row(matrix: &[f32], index: usize, width: usize) -> Vec<f64> {
    matrix[index * width..(index + 1) * width].iter().map(|&value| value.into()).collect()
}

fn product(matrix: &[f32], x: &[f64]) -> Vec<f64> {
    let rows = matrix.chunks_exact(x.len());
    rows.map(|row| row.iter().zip(x).map(|(&weight, value)| f64::from(weight) * value).sum()).collect()
}

fn rms_norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean + 1e-5).sqrt();
    x.iter().zip(weight).map(|(value, &weight)| value * scale * f64::from(weight)).collect()
}

/// Pairs (i, i + d/2), as Hugging Face's `rotate_half`.
fn rotate(x: &mut [f64], head_dim: usize, position: usize, inverse: &[f64], amplitude: f64) {
    let half = head_dim / 2;
    for head in x.chunks_exact_mut(head_dim) {
        for i in 0..half {
            let (sin, cos) = (position as f64 * inverse[i]).sin_cos();
            let (a, b) = (head[i], head[i + half]);
            head[i] = (a * cos - b * sin) * amplitude;
            head[i + half] = (b * cos + a * sin) * amplitude;
        }
    }
}

fn softmax(scores: Vec<f64>) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn through_f16(x: &[f64]) -> Vec<f64> {
    x.iter().map(|&value| f16::from_f64(value).to_f64()).collect()
}
