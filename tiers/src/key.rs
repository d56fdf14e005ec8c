//! The identity of chunks: a keyed BLAKE3 chain over token ids.
//!
//! A chunk's key names everything that its K/V depends on: the tenant, the model and layout, and all tokens up to its
//! end. So the key *is* the prefix, and equal keys mean equal bytes, whoever computed them.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use keepsake_kernels::KvLayout;

/// 128 bits that name a chunk. Not guessable without the tenant's salt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey(pub [u8; 16]);

/// A map by chunk key. Keys are outputs of a keyed hash, so nobody can choose them to collide: hashing them again is wasted.
pub type ChunkMap<V> = HashMap<ChunkKey, V, BuildHasherDefault<KeyHasher>>;

/// Takes the bytes it is given as they are: for keys that are random already.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks_exact(8) {
            self.0 ^= u64::from_le_bytes(part.try_into().expect("eight bytes"));
        }
    }

    /// The length of the key.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

impl ChunkKey {
    /// The key of the chunk that follows this one and holds `tokens`.
    pub fn child(&self, tokens: &[u32]) -> ChunkKey {
        let mut chaining = [0; 32];
        chaining[..16].copy_from_slice(&self.0);
        chaining[16..].copy_from_slice(b"keepsake chunk 1");
        let mut hasher = blake3::Hasher::new_keyed(&chaining);
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        ChunkKey(first_half(hasher.finalize()))
    }
}

impl fmt::Display for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ChunkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkKey({self})")
    }
}

/// Where chains of keys begin.
pub struct KeyChain;

impl KeyChain {
    /// The parent of a tenant's first chunks.
    pub fn root(tenant_salt: &[u8; 32], fingerprint: &[u8; 32]) -> ChunkKey {
        ChunkKey(first_half(blake3::keyed_hash(tenant_salt, fingerprint)))
    }

    /// A tenant's salt, from the secret in the turn store and never from a request.
    pub fn tenant_salt(secret: &[u8; 32], tenant: &str) -> [u8; 32] {
        *blake3::keyed_hash(secret, tenant.as_bytes()).as_bytes()
    }

    /// The keys of all whole chunks of `tokens`, in order.
    pub fn chunk_keys(root: ChunkKey, tokens: &[u32], chunk_tokens: usize) -> Vec<ChunkKey> {
        let mut parent = root;
        let chunks = tokens.chunks_exact(chunk_tokens);
        chunks
            .map(|chunk| {
                parent = parent.child(chunk);
                parent
            })
            .collect()
    }
}

/// Everything besides tokens and tenant that K/V bytes depend on.
#[derive(Clone, Debug)]
pub struct KeyScope {
    /// Content of weights, RoPE settings and shapes: `Model::fingerprint()`.
    pub model: [u8; 32],
    pub layout: KvLayout,
    /// Element type of K/V, such as `f16`.
    pub dtype: String,
    /// This worker's share of the heads: `rank` of `num_ranks`.
    pub rank: u32,
    pub num_ranks: u32,
    /// The kind of device that computes, such as `cpu`.
    pub backend: String,
    /// `Device::numeric_version()`: changes when the bits it computes change.
    pub numeric_version: String,
}

impl KeyScope {
    /// Digest of all fields.
    pub fn fingerprint(&self) -> [u8; 32] {
        // Taking the layout apart here makes a new field a compile error until it is hashed.
        let KvLayout { num_layers, num_kv_heads, head_dim, chunk_tokens } = self.layout;
        let mut hasher = blake3::Hasher::new_derive_key("keepsake K/V fingerprint 1");
        hasher.update(&self.model);
        for number in [num_layers, num_kv_heads, head_dim, chunk_tokens] {
            hasher.update(&(number as u64).to_le_bytes());
        }
        for number in [self.rank, self.num_ranks] {
            hasher.update(&number.to_le_bytes());
        }
        for text in [&self.dtype, &self.backend, &self.numeric_version] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        *hasher.finalize().as_bytes()
    }

    /// What stored chunks carry to say whose they are.
    pub fn layout_id(&self) -> [u8; 16] {
        first_half(blake3::hash(&self.fingerprint()))
    }
}

fn first_half(hash: blake3::Hash) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&hash.as_bytes()[..16]);
    half
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn scope() -> KeyScope {
        KeyScope {
            model: [1; 32],
            layout: KvLayout { num_layers: 2, num_kv_heads: 2, head_dim: 8, chunk_tokens: 4 },
            dtype: "f16".to_owned(),
            rank: 0,
            num_ranks: 1,
            backend: "cpu".to_owned(),
            numeric_version: "1".to_owned(),
        }
    }

    #[test]
    fn every_parameter_changes_the_fingerprint() {
        type Change = fn(&mut KeyScope);
        let changes: [Change; 12] = [
            |_| {},
            |s| s.model[31] ^= 1,
            |s| s.layout.num_layers += 1,
            |s| s.layout.num_kv_heads += 1,
            |s| s.layout.head_dim += 1,
            |s| s.layout.chunk_tokens += 1,
            // Two heads of eight and four of four give the same number of bytes.
            |s| (s.layout.num_kv_heads, s.layout.head_dim) = (4, 4),
            |s| s.dtype = "bf16".to_owned(),
            |s| s.rank = 1,
            |s| s.num_ranks = 2,
            |s| s.backend = "cuda".to_owned(),
            |s| s.numeric_version = "2".to_owned(),
        ];
        let scopes = changes.map(|change| {
            let mut scope = scope();
            change(&mut scope);
            scope
        });
        let fingerprints: HashSet<_> = scopes.iter().map(KeyScope::fingerprint).collect();
        let layout_ids: HashSet<_> = scopes.iter().map(KeyScope::layout_id).collect();
        let roots: HashSet<_> = scopes.iter().map(|scope| KeyChain::root(&[0; 32], &scope.fingerprint())).collect();
        assert_eq!(fingerprints.len(), changes.len());
        assert_eq!(layout_ids.len(), changes.len());
        assert_eq!(roots.len(), changes.len());
    }

    #[test]
    fn a_key_is_its_whole_prefix_and_tenant() {
        let fingerprint = scope().fingerprint();
        let root = |tenant| KeyChain::root(&KeyChain::tenant_salt(&[7; 32], tenant), &fingerprint);
        let keys = |tenant, tokens: &[u32]| KeyChain::chunk_keys(root(tenant), tokens, 2);
        let base = keys("a", &[1, 2, 3, 4, 5]);
        assert_eq!(base.len(), 2);
        assert_eq!(base, keys("a", &[1, 2, 3, 4]));
        assert_eq!(base[0], keys("a", &[1, 2, 9, 9])[0]);
        assert_ne!(base[1], keys("a", &[9, 2, 3, 4])[1]);
        assert_ne!(base[0], keys("b", &[1, 2])[0]);
        assert_ne!(root("a"), root("b"));
    }

    #[test]
    fn crafted_neighbours_do_not_collide() {
        let root = KeyChain::root(&[0; 32], &[0; 32]);
        let mut seen = HashSet::new();
        // A polynomial hash with factor 31 maps all of these to one value.
        for t in 1_000..2_000u32 {
            assert!(seen.insert(root.child(&[100 + (t - 1_000), 31 * 2_000 - 31 * (t - 1_000)])));
        }
        assert_ne!(root.child(&[5, 40]), root.child(&[5 + 1, 40 - 31]));
        assert_ne!(root.child(&[]), root.child(&[0]));
        assert_ne!(root.child(&[1]).child(&[2]), root.child(&[1, 2]));
    }

    #[test]
    fn display_is_hex() {
        assert_eq!(ChunkKey([0xab; 16]).to_string(), "ab".repeat(16));
    }
}
