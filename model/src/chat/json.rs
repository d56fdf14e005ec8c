//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what models were trained on.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The `tojson` filter of Hugging Face templates: no HTML escaping, `", "` and `": "` as separators, optional `indent`.
pub(super) fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let named: Option<usize> = options.get("indent")?;
    // Accepted and without effect: it is how the text is written anyway.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent.or(named) {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(16));
            let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, PythonFormatter)),
    };
    written.map_err(|e| Error::new(ErrorKind::InvalidOperation, "cannot serialize to JSON").with_source(e))?;
    let text = String::from_utf8(bytes).expect("serde_json writes UTF-8");
    Ok(Value::from(text))
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first {
            return Ok(());
        }
        writer.write_all(b", ")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first {
            return Ok(());
        }
        writer.write_all(b", ")
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
