//! Sizes and durations as people write them: `"2 GiB"`, `"30s"`.
//!
//! `bytesize` itself saturates on overflow and takes bare numbers; a configuration should refuse both, so the
//! parser here is exact and insists on a unit. Use the two modules with `#[serde(with = "...")]`.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;

/// The longest duration that is accepted: far beyond any use, and safe to add to any clock.
pub const MAX_DURATION: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// `"2 GiB"` to a [`ByteSize`]: digits with an optional fraction, then a unit. Refuses signs, bare numbers, NaN
/// and anything past 2^63 bytes (TOML's own integers end there).
pub fn parse_size(text: &str) -> Result<ByteSize, String> {
    const EXPECTED: &str = "expected a size with its unit, such as \"2 GiB\" or \"512 MiB\"";
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(EXPECTED)?;
    let (number, unit) = (&text[..digits], text[digits..].trim());
    let unit_bytes = unit_bytes(unit).ok_or(EXPECTED)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return Err(EXPECTED.to_owned());
    }
    const TOO_LARGE: &str = "larger than 2^63 bytes";
    let whole: u64 = whole.parse().map_err(|_| TOO_LARGE)?;
    // Six digits of a fraction are exact to a millionth of the unit; more is noise.
    let fraction = &fraction[..fraction.len().min(6)];
    let millionths: u64 = format!("{fraction:0<6}").parse().expect("six decimal digits are a u64");
    let bytes =
        u128::from(whole) * u128::from(unit_bytes) + u128::from(millionths) * u128::from(unit_bytes) / 1_000_000;
    if bytes > i64::MAX as u128 {
        return Err(TOO_LARGE.to_owned());
    }
    Ok(ByteSize(bytes as u64))
}

/// The shortest text that [`parse_size`] reads back as the same number of bytes.
pub fn format_size(size: ByteSize) -> String {
    let bytes = size.as_u64();
    let units = [("TiB", bytesize::TIB), ("GiB", bytesize::GIB), ("MiB", bytesize::MIB), ("KiB", bytesize::KIB)];
    for (unit, unit_bytes) in units {
        if bytes >= unit_bytes && bytes.is_multiple_of(unit_bytes) {
            return format!("{} {unit}", bytes / unit_bytes);
        }
    }
    format!("{bytes} B")
}

/// A size for people, rounded to a tenth of its unit (error messages only).
pub(crate) fn approximate(bytes: u64) -> String {
    let size = ByteSize(bytes);
    if bytes.is_multiple_of(bytesize::MIB) && bytes < 10 * bytesize::GIB {
        return format_size(size);
    }
    size.display().iec().to_string().replace(".0 ", " ")
}

fn unit_bytes(unit: &str) -> Option<u64> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "b" => 1,
        "kib" => bytesize::KIB,
        "mib" => bytesize::MIB,
        "gib" => bytesize::GIB,
        "tib" => bytesize::TIB,
        "kb" => bytesize::KB,
        "mb" => bytesize::MB,
        "gb" => bytesize::GB,
        "tb" => bytesize::TB,
        _ => return None,
    })
}

/// `#[serde(with = "keepsake_config::units::size")]` for a [`ByteSize`].
pub mod size {
    use super::{fmt, format_size, parse_size, ByteSize};
    use serde::{de, Deserializer, Serializer};

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        struct Size;
        impl de::Visitor<'_> for Size {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with its unit, such as \"2 GiB\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                parse_size(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Size)
    }

    pub fn serialize<S: Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format_size(*size))
    }
}

/// `#[serde(default, with = "keepsake_config::units::optional_size")]` for an `Option<ByteSize>`.
pub mod optional_size {
    use super::{size, ByteSize};
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<ByteSize>, D::Error> {
        #[derive(Deserialize)]
        struct Wrapped(#[serde(with = "size")] ByteSize);
        Ok(Option::<Wrapped>::deserialize(d)?.map(|wrapped| wrapped.0))
    }

    pub fn serialize<S: Serializer>(value: &Option<ByteSize>, s: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => size::serialize(value, s),
            None => s.serialize_none(),
        }
    }
}

/// `#[serde(with = "keepsake_config::units::duration")]` for a [`Duration`].
pub mod duration {
    pub use humantime_serde::{deserialize, serialize};
}
