use std::os::unix::fs::PermissionsExt;

use super::*;

fn config(folder: &std::path::Path) -> TurnStoreConfig {
    TurnStoreConfig { path: folder.join("turns"), capacity_bytes: 64 << 20, ttl: Duration::from_secs(1_000) }
}

fn id(index: u8) -> [u8; 16] {
    [index; 16]
}

fn turn(index: u8, parent: Option<u8>) -> TurnRecord {
    TurnRecord {
        id: id(index),
        parent: parent.map(id),
        tenant: "tenant".to_owned(),
        tokens: vec![u32::from(index), 1_000 + u32::from(index)],
        items: format!("items of {index}").into_bytes(),
        created_at: 10_000 + u64::from(index),
        fingerprints: [[1; 32], [2; 32], [3; 32]],
        finished: true,
        hidden: false,
    }
}

fn tokens(indices: &[u8]) -> Vec<u32> {
    let each = indices.iter().flat_map(|&i| [u32::from(i), 1_000 + u32::from(i)]);
    each.collect()
}

/// 1 - 2 - 3, and 4 as another continuation of 2.
fn tree(folder: &std::path::Path) -> TurnStore {
    let store = TurnStore::open(config(folder)).unwrap();
    store.put(vec![turn(1, None), turn(2, Some(1))]).unwrap();
    store.put(vec![turn(3, Some(2))]).unwrap();
    store.put(vec![turn(4, Some(2))]).unwrap();
    store
}

/// Dooms one chunk a token that goes.
fn keys_of() -> KeysOf {
    Arc::new(|log| log.tokens[log.num_kept..].iter().map(|token| ChunkKey([*token as u8; 16])).collect())
}

fn delete(store: &TurnStore, index: u8) -> bool {
    store.delete(&id(index), keys_of()).unwrap().is_some()
}

fn expire(store: &TurnStore, now: u64) -> usize {
    store.expire(now, &keys_of()).unwrap().ids.len()
}

fn removed(store: &TurnStore, index: u8) -> Vec<RemovedLog> {
    let removed = store.delete(&id(index), keys_of()).unwrap().expect("it was visible");
    assert_eq!(removed.ids, [id(index)]);
    removed.logs
}

fn log(indices: &[u8], num_kept: usize) -> Vec<RemovedLog> {
    vec![RemovedLog { tenant: "tenant".to_owned(), tokens: tokens(indices), num_kept }]
}

#[test]
fn deletions_name_what_no_living_turn_owns() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    assert_eq!(removed(&store, 2), [], "3 and 4 need its tokens");
    assert_eq!(removed(&store, 3), log(&[1, 2, 3], 4), "4 still goes through 1 and 2");
    assert_eq!(removed(&store, 4), log(&[1, 2, 4], 2), "the tombstone went with it");
    assert_eq!(removed(&store, 1), log(&[1], 0));
}

#[test]
fn expiry_names_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    let expired = store.expire(20_000, &keys_of()).unwrap();
    assert_eq!(expired.ids, [id(4), id(3), id(2), id(1)], "youngest first");
    let logs = [log(&[1, 2, 4], 4), log(&[1, 2, 3], 4), log(&[1, 2], 2), log(&[1], 0)].concat();
    assert_eq!(expired.logs, logs);
}

#[test]
fn forks_share_their_past() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    assert_eq!(store.get(&id(2)).unwrap(), Some(turn(2, Some(1))));
    assert_eq!(store.chain(&id(3)).unwrap(), Some(tokens(&[1, 2, 3])));
    assert_eq!(store.chain(&id(4)).unwrap(), Some(tokens(&[1, 2, 4])));
    assert_eq!(store.num_children(&id(2)).unwrap(), 2);
    assert_eq!(store.num_children(&id(3)).unwrap(), 0);
    assert_eq!(store.get(&id(9)).unwrap(), None);
    assert_eq!(store.chain(&id(9)).unwrap(), None);
    let path = store.path(&id(4)).unwrap().unwrap();
    assert_eq!(path, [turn(1, None), turn(2, Some(1)), turn(4, Some(2))]);
}

#[test]
fn everything_is_there_after_reopening() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    let secret = store.secret();
    assert!(delete(&store, 3));
    store.close(Instant::now()).unwrap();
    store.close(Instant::now()).unwrap();
    assert!(matches!(store.put(vec![turn(5, None)]), Err(TierError::Closed { .. })));
    assert!(matches!(store.get(&id(1)), Err(TierError::Closed { .. })));
    drop(store);
    let store = TurnStore::open(config(folder.path())).unwrap();
    assert_eq!(store.secret(), secret);
    assert_eq!(store.chain(&id(4)).unwrap(), Some(tokens(&[1, 2, 4])));
    assert_eq!(store.get_for_descendants(&id(3)).unwrap(), None);
}

#[test]
fn a_deleted_turn_is_hidden_while_descendants_need_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    assert!(delete(&store, 2));
    assert!(!delete(&store, 2), "deleted already");
    assert_eq!(store.get(&id(2)).unwrap(), None);
    let tombstone = store.get_for_descendants(&id(2)).unwrap().unwrap();
    assert!(tombstone.hidden && tombstone.items.is_empty());
    assert_eq!(store.chain(&id(3)).unwrap(), Some(tokens(&[1, 2, 3])));
    // The first of two descendants goes: the tokens stay for the other.
    assert!(delete(&store, 3));
    assert_eq!(store.get_for_descendants(&id(3)).unwrap(), None, "a leaf is really gone");
    assert_eq!(store.chain(&id(4)).unwrap(), Some(tokens(&[1, 2, 4])));
    // The last one goes, and the tombstone with it; the visible root stays.
    assert!(delete(&store, 4));
    assert_eq!(store.get_for_descendants(&id(2)).unwrap(), None);
    assert_eq!(store.num_children(&id(1)).unwrap(), 0);
    assert_eq!(store.get(&id(1)).unwrap(), Some(turn(1, None)));
    assert!(!delete(&store, 9));
}

#[test]
fn a_chain_of_tombstones_goes_with_its_last_descendant() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    for index in [1, 2, 4, 3] {
        assert!(delete(&store, index));
    }
    for index in 1..=4 {
        assert_eq!(store.get_for_descendants(&id(index)).unwrap(), None);
    }
}

#[test]
fn a_parent_must_be_stored() {
    let folder = tempfile::tempdir().unwrap();
    let store = TurnStore::open(config(folder.path())).unwrap();
    let orphan = store.put(vec![turn(1, None), turn(2, Some(9))]);
    assert!(matches!(orphan, Err(TierError::Invalid { .. })));
    assert_eq!(store.get(&id(1)).unwrap(), None, "all or none");
}

#[test]
fn a_turn_can_be_finished_later() {
    let folder = tempfile::tempdir().unwrap();
    let store = TurnStore::open(config(folder.path())).unwrap();
    let mut first = turn(1, None);
    first.finished = false;
    store.put(vec![first.clone()]).unwrap();
    first.finished = true;
    first.tokens.push(7);
    store.put(vec![first.clone()]).unwrap();
    assert_eq!(store.get(&id(1)).unwrap(), Some(first));
}

#[test]
fn old_turns_expire_and_living_descendants_keep_their_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    let mut young = turn(5, Some(3));
    young.created_at = 20_000;
    store.put(vec![young]).unwrap();
    assert_eq!(expire(&store, 10_000), 0);
    assert_eq!(expire(&store, 12_000), 4);
    assert_eq!(expire(&store, 12_000), 0);
    for index in 1..=4 {
        assert_eq!(store.get(&id(index)).unwrap(), None);
    }
    assert_eq!(store.get_for_descendants(&id(4)).unwrap(), None, "an old leaf is gone");
    assert_eq!(store.chain(&id(5)).unwrap(), Some(tokens(&[1, 2, 3, 5])));
    assert_eq!(expire(&store, 30_000), 1);
    for index in 1..=5 {
        assert_eq!(store.get_for_descendants(&id(index)).unwrap(), None);
    }
}

#[test]
fn more_turns_than_a_batch_expire_in_one_call() {
    let folder = tempfile::tempdir().unwrap();
    let store = TurnStore::open(config(folder.path())).unwrap();
    let many = 2 * EXPIRE_BATCH + 7;
    let turns = (0..many).map(|index| {
        let mut turn = turn(1, None);
        turn.id = (index as u128 + 1).to_be_bytes();
        turn
    });
    store.put(turns.collect()).unwrap();
    assert_eq!(expire(&store, 1 << 40), many);
}

#[test]
fn doomed_chunks_are_remembered_until_confirmed() {
    let folder = tempfile::tempdir().unwrap();
    let store = tree(folder.path());
    // Of tokens 3 and 1003.
    let (one, two) = (ChunkKey([3; 16]), ChunkKey([235; 16]));
    assert!(delete(&store, 3));
    drop(store);
    let store = TurnStore::open(config(folder.path())).unwrap();
    assert_eq!(store.doomed_chunks().unwrap(), [one, two]);
    store.forget_doomed(&[one]).unwrap();
    assert_eq!(store.doomed_chunks().unwrap(), [two]);
}

#[test]
fn waiting_puts_share_syncs_and_all_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(TurnStore::open(config(folder.path())).unwrap());
    let (sender, answers) = crossbeam_channel::unbounded();
    for index in 0..200u8 {
        let sender = sender.clone();
        let done = move |result: Result<()>| sender.send(result.is_ok()).unwrap();
        store.put_then(vec![turn(index, None)], done).unwrap();
    }
    drop(sender);
    assert_eq!(answers.iter().filter(|ok| *ok).count(), 200);
    assert_eq!(store.get(&id(199)).unwrap(), Some(turn(199, None)));
}

#[test]
fn a_full_store_refuses_and_takes_again_after_expiry() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.capacity_bytes = 16 << 20;
    let store = TurnStore::open(config).unwrap();
    let big = |index: u32| {
        let mut turn = turn(1, None);
        turn.id = u128::from(index + 1).to_be_bytes();
        turn.items = crate::conformance::payload(u64::from(index), 256 << 10);
        turn
    };
    let mut index = 0;
    let refusal = loop {
        match store.put(vec![big(index)]) {
            Ok(()) => index += 1,
            Err(error) => break error,
        }
        assert!(index < 64, "more than the cap was taken");
    };
    assert!(matches!(refusal, TierError::Full { .. }), "{refusal}");
    assert!(index >= 16, "full after {index} of about 60 turns");
    assert!(store.usage().used_bytes <= 16 << 20);
    // Reading goes on, deleting works, and space comes back.
    assert!(store.get(&big(0).id).unwrap().is_some());
    expire(&store, 1 << 40);
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.put(vec![big(1_000)]).is_err() {
        assert!(Instant::now() < deadline, "the room of expired turns never came back");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_secret_is_private_and_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let store = TurnStore::open(config(folder.path())).unwrap();
    let (path, secret) = (folder.path().join("turns/secret"), store.secret());
    drop(store);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(&folder.path().join("turns")), 0o700);
    assert_ne!(secret, [0; 32]);
    std::fs::write(&path, [1; 31]).unwrap();
    assert!(TurnStore::open(config(folder.path())).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), [1; 31]);
}
