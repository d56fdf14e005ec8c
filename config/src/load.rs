//! Layers of a configuration, defaults <- TOML file <- environment, and errors that name the place.

use std::path::Path;

use figment::error::Kind;
use figment::providers::{Env, Serialized};
use figment::Figment;

use crate::{Config, ConfigError};

/// `KEEPSAKE__SECTION__KEY` overrides `section.key`; a list is given whole, in TOML's inline form.
const ENV_PREFIX: &str = "KEEPSAKE__";

pub(crate) fn read(file: Option<&Path>) -> Result<Config, ConfigError> {
    let mut figment = Figment::new();
    if let Some(file) = file {
        let text =
            std::fs::read_to_string(file).map_err(|cause| ConfigError::Unreadable { file: file.to_owned(), cause })?;
        figment = figment.merge(Serialized::defaults(parse(file, &text)?));
    }
    figment = figment.merge(Env::prefixed(ENV_PREFIX).split("__"));
    figment.extract().map_err(|error| {
        // The merged tree, for the value in the message.
        let merged: toml::Table = figment.extract().unwrap_or_default();
        name_variable(explain(error, &merged))
    })
}

fn parse(file: &Path, text: &str) -> Result<toml::Table, ConfigError> {
    text.parse().map_err(|error: toml::de::Error| {
        let offset = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = &text.as_bytes()[..offset];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        ConfigError::Syntax {
            file: file.to_owned(),
            line: 1 + before.iter().filter(|&&b| b == b'\n').count(),
            column: 1 + offset - line_start,
            message: one_line(error.message()),
        }
    })
}

/// If the error's key was set by a variable, says so: the file would be searched in vain.
pub(crate) fn name_variable(error: ConfigError) -> ConfigError {
    let Some(path) = error.path() else {
        return error;
    };
    let mut variable = ENV_PREFIX.trim_end_matches('_').to_owned();
    for segment in path.split(['.', '[']) {
        variable.push_str("__");
        variable.push_str(&segment.to_ascii_uppercase());
        if std::env::var_os(&variable).is_some() {
            return error.set_by(&variable);
        }
    }
    error
}

/// One line for the first thing that does not fit, with the value that `tree` holds there.
pub(crate) fn explain(error: figment::Error, tree: &toml::Table) -> ConfigError {
    let mut segments = error.path.clone();
    let reason = match error.kind {
        Kind::MissingField(field) => {
            segments.push(field.into_owned());
            let path = dotted(&segments);
            return ConfigError::Missing { path, reason: "missing, and there is no default".to_owned() };
        }
        Kind::UnknownField(field, known) => {
            let reason = unknown_key(&field, known);
            if segments.last() != Some(&field) {
                segments.push(field);
            }
            reason
        }
        Kind::InvalidType(_, expected) | Kind::InvalidValue(_, expected) => {
            format!("expected {}", plain_words(&expected))
        }
        Kind::UnknownVariant(_, known) => format!("must be one of {}", quoted_list(known)),
        Kind::Message(message) if message.contains("socket address") => {
            "expected an address with its port, such as \"127.0.0.1:8000\"".to_owned()
        }
        other => one_line(&other.to_string()),
    };
    let value = match lookup(tree, &segments) {
        _ if segments.iter().any(|segment| segment == "keys") => "***".to_owned(),
        Some(value) => one_line(&value.to_string()),
        None => "?".to_owned(),
    };
    ConfigError::invalid(dotted(&segments), value, reason)
}

fn unknown_key(key: &str, known: &[&'static str]) -> String {
    let nearest = known.iter().map(|name| (edit_distance(key, name), name)).min();
    match nearest {
        Some((distance, name)) if distance <= key.len().max(3) / 3 => {
            format!("unknown key, did you mean `{name}`?")
        }
        Some(_) => format!("unknown key, the known ones are {}", quoted_list(known)),
        None => "unknown key, this takes none".to_owned(),
    }
}

/// serde names Rust's types; an operator wants TOML's.
fn plain_words(expected: &str) -> String {
    match expected {
        "usize" | "u64" | "u32" => "a whole number, 0 or more".to_owned(),
        "f64" | "f32" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "path string" => "a path in quotes".to_owned(),
        "a string" => "text in quotes".to_owned(),
        "a duration" => "a duration with its unit, such as \"30s\" or \"10m\"".to_owned(),
        other if other.starts_with("enum ") => "text in quotes".to_owned(),
        other if other.starts_with("struct ") => "a table".to_owned(),
        other => one_line(other),
    }
}

fn quoted_list(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// `["tiers", "1", "capacity"]` as `tiers[1].capacity`.
fn dotted(segments: &[String]) -> String {
    let mut path = String::new();
    for segment in segments {
        match segment.parse::<usize>() {
            Ok(index) => path.push_str(&format!("[{index}]")),
            Err(_) if path.is_empty() => path.push_str(segment),
            Err(_) => path.push_str(&format!(".{segment}")),
        }
    }
    path
}

fn lookup(tree: &toml::Table, segments: &[String]) -> Option<toml::Value> {
    let (first, rest) = segments.split_first()?;
    let mut value = tree.get(first)?;
    for segment in rest {
        value = match segment.parse::<usize>() {
            Ok(index) => value.get(index)?,
            Err(_) => value.get(segment.as_str())?,
        };
    }
    Some(value.clone())
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Levenshtein's distance, one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
