//! Longest-match lookup of a fixed set of spellings.

/// A byte trie over token spellings. Built once per tokenizer; the sets have at most some thousand entries.
#[derive(Debug)]
pub(crate) struct SpellingTrie {
    nodes: Vec<Node>,
    /// Whether any spelling begins with this byte: most text positions are rejected by one look here.
    first_bytes: [bool; 256],
}

#[derive(Debug, Default)]
struct Node {
    /// Sorted by byte.
    children: Vec<(u8, u32)>,
    id: Option<u32>,
}

/// A piece of a text: a spelling that was found, or the text between two.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    Token(u32),
    Text(&'a str),
}

impl SpellingTrie {
    /// Empty spellings are left out; of equal spellings the first keeps its id.
    pub fn new<'a>(spellings: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let mut trie = Self { nodes: vec![Node::default()], first_bytes: [false; 256] };
        for (spelling, id) in spellings {
            trie.insert(spelling.as_bytes(), id);
        }
        trie
    }

    fn insert(&mut self, spelling: &[u8], id: u32) {
        let Some(&first) = spelling.first() else {
            return;
        };
        self.first_bytes[first as usize] = true;
        let mut node = 0;
        for &byte in spelling {
            let children = &self.nodes[node].children;
            node = match children.binary_search_by_key(&byte, |child| child.0) {
                Ok(at) => children[at].1 as usize,
                Err(at) => {
                    let created = self.nodes.len();
                    self.nodes.push(Node::default());
                    self.nodes[node].children.insert(at, (byte, created as u32));
                    created
                }
            };
        }
        self.nodes[node].id.get_or_insert(id);
    }

    /// The longest spelling that `bytes` begins with: its length in bytes and its id.
    pub fn longest_match(&self, bytes: &[u8]) -> Option<(usize, u32)> {
        if !self.first_bytes[*bytes.first()? as usize] {
            return None;
        }
        let mut node = 0;
        let mut found = None;
        for (index, &byte) in bytes.iter().enumerate() {
            let Some(child) = self.child(node, byte) else {
                break;
            };
            node = child;
            if let Some(id) = self.nodes[node].id {
                found = Some((index + 1, id));
            }
        }
        found
    }

    /// Whether some spelling begins with all of `bytes` and goes on.
    pub fn is_proper_prefix(&self, bytes: &[u8]) -> bool {
        let mut node = 0;
        for &byte in bytes {
            match self.child(node, byte) {
                Some(child) => node = child,
                None => return false,
            }
        }
        !bytes.is_empty() && !self.nodes[node].children.is_empty()
    }

    /// Splits `text` at every spelling, leftmost first and longest of those, as Hugging Face's added vocabulary does.
    pub fn split<'a>(&self, text: &'a str) -> Vec<Segment<'a>> {
        let bytes = text.as_bytes();
        let mut segments = Vec::new();
        let (mut from, mut at) = (0, 0);
        while at < bytes.len() {
            // A match starts at a character boundary because spellings are whole UTF-8 strings.
            let Some((len, id)) = self.longest_match(&bytes[at..]) else {
                at += 1;
                continue;
            };
            if from < at {
                segments.push(Segment::Text(&text[from..at]));
            }
            segments.push(Segment::Token(id));
            at += len;
            from = at;
        }
        if from < text.len() {
            segments.push(Segment::Text(&text[from..]));
        }
        segments
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        let children = &self.nodes[node].children;
        let at = children.binary_search_by_key(&byte, |child| child.0).ok()?;
        Some(children[at].1 as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_leftmost_longest() {
        let trie = SpellingTrie::new([("<a>", 1), ("<a><b>", 2), ("é", 3)]);
        let segments = trie.split("x<a>y<a><b>éz<a");
        let expected = vec![
            Segment::Text("x"),
            Segment::Token(1),
            Segment::Text("y"),
            Segment::Token(2),
            Segment::Token(3),
            Segment::Text("z<a"),
        ];
        assert_eq!(segments, expected);
        assert!(trie.is_proper_prefix(b"<a><"));
        assert!(!trie.is_proper_prefix(b"<a><b>"));
        assert!(!trie.is_proper_prefix(b""));
    }
}
