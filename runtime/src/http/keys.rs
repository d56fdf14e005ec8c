//! API keys to tenants.

use keepsake_config::TenantConfig;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::error::ApiError;
use crate::messages::session::TenantId;

/// SHA-256 of every configured key. Digests of equal length compare in constant time, and no key stays in memory here.
pub(crate) struct Keys(Vec<([u8; 32], TenantId)>);

impl Keys {
    pub(crate) fn new(tenants: &[TenantConfig]) -> Self {
        let keys = tenants.iter().flat_map(|tenant| {
            let id = TenantId::new(&tenant.name);
            tenant.keys.iter().map(move |key| (Sha256::digest(key.expose()).into(), id.clone()))
        });
        Self(keys.collect())
    }

    /// Whose request this is. Without configured keys everybody is the anonymous tenant.
    pub(crate) fn tenant(&self, authorization: Option<&[u8]>) -> Result<TenantId, ApiError> {
        if self.0.is_empty() {
            return Ok(TenantId::anonymous());
        }
        let header = authorization
            .ok_or_else(|| ApiError::unauthorized("no API key was given; send it as 'Authorization: Bearer KEY'"))?;
        let key = bearer(header)
            .ok_or_else(|| ApiError::unauthorized("the Authorization header is not of the form 'Bearer KEY'"))?;
        let digest: [u8; 32] = Sha256::digest(key).into();
        let mut tenant = None;
        // Every key is compared, also after a match: the time taken says nothing about which one it was.
        for (known, id) in &self.0 {
            if bool::from(known.ct_eq(&digest)) {
                tenant = Some(id.clone());
            }
        }
        tenant.ok_or_else(|| ApiError::unauthorized("the API key is not valid"))
    }
}

/// The key of `Bearer KEY`; the scheme's case and the spaces around the key do not matter.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let header = header.trim_ascii();
    let space = header.iter().position(u8::is_ascii_whitespace)?;
    let (scheme, key) = (&header[..space], header[space..].trim_ascii());
    (scheme.eq_ignore_ascii_case(b"bearer") && !key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::ResponseError;
    use keepsake_config::Secret;

    fn keys() -> Keys {
        let tenant = |name: &str, keys: &[&str]| TenantConfig {
            weight: 1.0,
            name: name.to_owned(),
            keys: keys.iter().map(|key| Secret::new(*key)).collect(),
        };
        Keys::new(&[tenant("a", &["key-a1", "key-a2"]), tenant("b", &["key-b"])])
    }

    #[test]
    fn keys_map_to_their_tenant() {
        let table = [("Bearer key-a1", "a"), ("bearer key-a2", "a"), ("BEARER   key-b  ", "b"), ("bearer\tkey-b", "b")];
        for (header, name) in table {
            let tenant = keys().tenant(Some(header.as_bytes())).expect("a known key");
            assert_eq!(tenant.as_str(), name, "{header}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for header in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer key-a",
            "Bearer key-a1x",
            "Basic key-a1",
            "key-a1",
            "Bearer  key-a1 key-a1",
        ] {
            let error = keys().tenant(Some(header.as_bytes())).expect_err(header);
            assert_eq!(error.status_code().as_u16(), 401, "{header}");
        }
        assert_eq!(keys().tenant(None).expect_err("no header").status_code().as_u16(), 401);
    }

    #[test]
    fn without_keys_everybody_is_anonymous() {
        let tenant = Keys::new(&[]).tenant(Some(b"Bearer whatever")).expect("no keys");
        assert_eq!(tenant, TenantId::anonymous());
    }
}
