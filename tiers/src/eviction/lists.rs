//! Many doubly linked lists threaded through one vector: append, remove and walk are O(1) a step, and nothing is scanned.

use std::collections::HashMap;

use super::ChunkUse;
use crate::{ChunkKey, ChunkMap};

/// Chunks in lists, each list from the chunk appended first to the one appended last. A list is known by a number.
#[derive(Debug, Default)]
pub(super) struct ChunkLists {
    nodes: Vec<Node>,
    unused: Vec<usize>,
    by_key: ChunkMap<usize>,
    lists: HashMap<u32, Ends>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) key: ChunkKey,
    pub(super) chunk: ChunkUse,
    pub(super) list: u32,
    earlier: Option<usize>,
    later: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    first: usize,
    last: usize,
    len: usize,
}

impl ChunkLists {
    /// Puts the chunk at the end of a list, taking it from wherever it was.
    pub(super) fn append(&mut self, list: u32, key: ChunkKey, chunk: ChunkUse) {
        self.remove(&key);
        let earlier = self.lists.get(&list).map(|ends| ends.last);
        let node = Node { key, chunk, list, earlier, later: None };
        let index = match self.unused.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.by_key.insert(key, index);
        match earlier {
            Some(earlier) => {
                self.nodes[earlier].later = Some(index);
                let ends = self.lists.get_mut(&list).expect("its last node was found above");
                ends.last = index;
                ends.len += 1;
            }
            None => {
                self.lists.insert(list, Ends { first: index, last: index, len: 1 });
            }
        }
    }

    pub(super) fn remove(&mut self, key: &ChunkKey) -> Option<Node> {
        let index = self.by_key.remove(key)?;
        let node = self.nodes[index];
        self.unused.push(index);
        if let Some(earlier) = node.earlier {
            self.nodes[earlier].later = node.later;
        }
        if let Some(later) = node.later {
            self.nodes[later].earlier = node.earlier;
        }
        let ends = self.lists.get_mut(&node.list).expect("a node's list is known");
        ends.len -= 1;
        match (node.earlier, node.later) {
            (None, None) => {
                self.lists.remove(&node.list);
            }
            (None, Some(later)) => ends.first = later,
            (Some(earlier), None) => ends.last = earlier,
            (Some(_), Some(_)) => {}
        }
        Some(node)
    }

    pub(super) fn get(&self, key: &ChunkKey) -> Option<&Node> {
        self.by_key.get(key).map(|index| &self.nodes[*index])
    }

    pub(super) fn list_len(&self, list: u32) -> usize {
        self.lists.get(&list).map_or(0, |ends| ends.len)
    }

    pub(super) fn iter(&self, list: u32) -> impl Iterator<Item = &Node> {
        let mut next = self.lists.get(&list).map(|ends| ends.first);
        std::iter::from_fn(move || {
            let node = &self.nodes[next?];
            next = node.later;
            Some(node)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}
