//! Which tokens are control tokens, and which of them end a generation.

/// Texts of tokens that end a generation in some family of models, whatever the file names as EOS.
/// The list is llama.cpp's (`llama-vocab.cpp`, "maintain a list of tokens that cause end-of-generation").
const END_OF_GENERATION: [&str; 14] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<EOT>",
    "_<EOT>",
    "<|END_OF_TURN_TOKEN|>",
];

pub(crate) fn ends_generation(text: &str) -> bool {
    END_OF_GENERATION.contains(&text)
}

/// Whether an added token that its file does not mark as special is one all the same.
///
/// Some `tokenizer.json` files mark role markers as plain added tokens; left so, user text could spell a turn boundary.
/// llama.cpp's converter reclassifies by the same shapes (`does_token_look_special`).
pub(crate) fn looks_special(text: &str) -> bool {
    let is_bracketed = |open: &str, close: &str| {
        text.len() > open.len() + close.len() && text.starts_with(open) && text.ends_with(close)
    };
    is_bracketed("<|", "|>")
        || is_bracketed("<｜", "｜>")
        || ends_generation(text)
        || matches!(text, "<start_of_turn>" | "[INST]" | "[/INST]" | "<s>" | "</s>" | "<bos>" | "<eos>")
}
