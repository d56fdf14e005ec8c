//! Pre-tokenisers of byte-level BPE vocabularies, by the name that GGUF gives them (`tokenizer.ggml.pre`).
//!
//! Names and patterns follow llama.cpp's `llama-vocab.cpp`; where it approximates the model's own `tokenizer.json`
//! (character classes that its regex engine lacks), the pattern here is the original one.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::SplitDelimiterBehavior;

use super::TokenizerError;

/// What a pre-tokeniser's name stands for.
pub(crate) struct PreTokenizer {
    pub splits: PreTokenizerWrapper,
    /// A word that is itself in the vocabulary is one token, whatever the merges say.
    pub ignore_merges: bool,
    /// Whether BOS is added when the file does not say.
    pub add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Letters with case, as DeepSeek LLM's `tokenizer.json` lists them.
const DEEPSEEK_LLM_WORDS: &str = concat!(
    r"\s?[",
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}",
    r"\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}",
    r"\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}",
    r"\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}",
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}",
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+",
);

impl PreTokenizer {
    /// The pre-tokeniser called `name`; a file without a name means GPT-2's.
    pub fn by_name(name: &str) -> Result<Self, TokenizerError> {
        let steps =
            match name {
                "default" | "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
                | "roberta-bpe" | "gigachat" | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es" | "jina-v2-de"
                | "a.x-4.0" | "mellum" => vec![split(GPT2)?],
                "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
                | "megrez-code" => vec![digits(), split(GPT2)?],
                "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
                | "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => {
                    vec![split(LLAMA3)?]
                }
                "qwen2" | "stablelm2" | "deepseek-r1-qwen" | "megrez" | "hunyuan" | "kormo" | "solar-open"
                | "grok-2" => vec![split(QWEN2)?],
                "qwen35" => vec![split(QWEN35)?],
                "seed-coder" => vec![split(SEED_CODER)?],
                "tekken" => vec![split(TEKKEN)?],
                "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => vec![split(GPT4O)?],
                "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => {
                    vec![split(r"\p{N}{1,3}")?, split("[一-龥\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+")?, split(DEEPSEEK3)?]
                }
                "deepseek-llm" => vec![
                    split(r"[\r\n]")?,
                    split(DEEPSEEK_LLM_WORDS)?,
                    split(r"\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+")?,
                    split(r"\s+$")?,
                    split("[一-龥\u{800}-一가-\u{d7ff}]+")?,
                    split(r"\p{N}+")?,
                ],
                "deepseek-coder" => vec![
                    split(r"[\r\n]")?,
                    split(r"\s?\p{L}+")?,
                    split(r"\s?\p{P}+")?,
                    split("[一-龥\u{800}-一가-\u{d7ff}]+")?,
                    digits(),
                ],
                "falcon" => vec![split(r"[\p{P}\$\+<=>\^~\|`]+")?, split(GPT2)?, split("[0-9][0-9][0-9]")?],
                "poro-chat" | "bloom" | "gpt3-finnish" => vec![split(BLOOM)?],
                "viking" => vec![split(BLOOM)?, digits()],
                other => return Err(TokenizerError::UnknownPreTokenizer(other.to_owned())),
            };
        let is_llama3 = matches!(
            name,
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2"
        );
        Ok(Self {
            splits: in_sequence(steps),
            ignore_merges: is_llama3 || name == "tekken",
            add_bos: is_llama3 || name == "tekken",
        })
    }
}

fn in_sequence(mut steps: Vec<PreTokenizerWrapper>) -> PreTokenizerWrapper {
    // Maps bytes to GPT-2's alphabet only; the splitting is done by then.
    steps.push(ByteLevel::new(false, false, false).into());
    Sequence::new(steps).into()
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, TokenizerError> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map(PreTokenizerWrapper::from)
        .map_err(TokenizerError::Library)
}

fn digits() -> PreTokenizerWrapper {
    Digits::new(true).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut pre_tokenized = PreTokenizedString::from(text);
        let pre = PreTokenizer::by_name(name).unwrap();
        pre.splits.pre_tokenize(&mut pre_tokenized).unwrap();
        pre_tokenized
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(word, _, _)| word.replace('Ġ', " ").replace('Ċ', "\n"))
            .collect()
    }

    #[test]
    fn digits_are_split_as_each_family_does() {
        let text = "x 12345";
        assert_eq!(words("gpt-2", text), ["x", " 12345"]);
        assert_eq!(words("smollm", text), ["x", " ", "1", "2", "3", "4", "5"]);
        assert_eq!(words("llama-bpe", text), ["x", " ", "123", "45"]);
        assert_eq!(words("qwen2", text), ["x", " ", "1", "2", "3", "4", "5"]);
        assert_eq!(words("deepseek-v3", text), ["x", " ", "123", "45"]);
        assert_eq!(words("falcon", text), ["x", " ", "123", "45"]);
    }

    #[test]
    fn case_and_newlines() {
        assert_eq!(words("tekken", "camelCase"), ["camel", "Case"]);
        assert_eq!(words("llama-bpe", "I'LL go\n\n x"), ["I", "'LL", " go", "\n\n", " x"]);
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("deepseek-llm", "ab!\ncd"), ["ab", "!", "\n", "cd"]);
    }

    #[test]
    fn unknown_names_are_refused_by_name() {
        let error = PreTokenizer::by_name("made-up").err().unwrap();
        assert!(error.to_string().contains("\"made-up\""), "{error}");
    }
}
