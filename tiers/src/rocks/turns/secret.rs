//! The secret behind tenants' salts: 32 random bytes in a file that only the owner reads.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use crate::{Result, TierError};

const FILE: &str = "secret";

/// Reads the secret in `folder`, or makes both. A file of another size is refused, never replaced: it would orphan all
/// stored chunks without a word.
pub(super) fn load_or_create(folder: &Path) -> Result<[u8; 32]> {
    let io = |action| move |e| TierError::io(&Arc::from("turns"), action, e);
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io("create its folder"))?;
    let path = folder.join(FILE);
    match fs::read(&path) {
        Ok(bytes) => <[u8; 32]>::try_from(bytes).map_err(|bytes| {
            let reason = format!("{} holds {} bytes instead of 32", path.display(), bytes.len());
            TierError::invalid(&Arc::from("turns"), reason)
        }),
        Err(e) if e.kind() == ErrorKind::NotFound => create(folder, &path).map_err(io("create its secret")),
        Err(e) => Err(io("read its secret")(e)),
    }
}

/// Written beside and renamed, so that a kill leaves either no secret or a whole one.
fn create(folder: &Path, path: &Path) -> std::io::Result<[u8; 32]> {
    let secret: [u8; 32] = rand::random();
    let draft = folder.join("secret.draft");
    match fs::remove_file(&draft) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    file.write_all(&secret)?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    File::open(folder)?.sync_all()?;
    Ok(secret)
}
