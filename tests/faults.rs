//! Disks that fail: damaged K/V costs a recompute and nothing else, a full disk costs K/V on disk and stored turns until it has room.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keepsake_tests::hardship::{files, flip_bits, folder_bytes, tear, SmallDisk};
use keepsake_tests::{wait_until, words, Ask, ModelKind, Reply, Server, Settings, Stopped};
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(60);

/// Everything unused is copied to disk at once.
fn spilling() -> Settings {
    Settings::tiers(ModelKind::Tiny, 64, 0, 600).set("scheduler", "swap_out_below", "1.0")
}

fn ask(turn: usize) -> Ask {
    Ask::new(&words::plain(&mut words::seeded(turn as u64), 20)).max(20).sampled(turn)
}

/// A conversation of three turns whose whole chunks are all on disk, the server stopped; and its last reply.
fn conversation_on_disk() -> (Stopped, Reply) {
    let server = Server::start(spilling());
    let mut reply = ask(0).send(&server.client);
    for turn in 1..3 {
        reply = ask(turn).after(&reply.id).send(&server.client);
    }
    let whole_chunks = (reply.usage.input + reply.usage.output - 1) / 32;
    wait_until("all chunks are on disk", LIMIT, || server.metrics().tier("chunks", "rocks") >= whole_chunks);
    (server.finish(), reply)
}

/// The next turn, which always says the same.
fn next_turn(server: &Server, parent: &Reply) -> Reply {
    ask(3).after(&parent.id).send(&server.client)
}

#[test]
fn damaged_chunks_are_recomputed_once_and_written_again() {
    let (stopped, parent) = conversation_on_disk();
    let server = stopped.copy().start();
    let expected = next_turn(&server, &parent);
    let whole_chunks = (parent.usage.input + parent.usage.output - 1) / 32;
    assert_eq!(expected.usage.tier("rocks"), 32 * whole_chunks, "undamaged, everything is loaded");
    server.finish();

    for file in files(&stopped.rocks().join("kv"), ".blob") {
        flip_bits(&file, 4096);
    }
    let server = stopped.start();
    let reply = next_turn(&server, &parent);
    assert_eq!((&reply.text, reply.usage.input), (&expected.text, expected.usage.input));
    let metrics = server.settle();
    assert_eq!(metrics.count("keepsake_kv_load_failures_total"), whole_chunks, "each damaged chunk fails once");
    assert_eq!(reply.usage.tier("rocks"), 0, "nothing damaged counts as cached: {:?}", reply.usage);
    // The server is as good as new.
    for turn in 4..9 {
        let again = next_turn(&server, &parent);
        assert_eq!((&again.text, again.usage.recomputed), (&expected.text, 0), "{turn}");
        assert!(again.usage.cached >= 32 * whole_chunks, "{:?}", again.usage);
    }
    wait_until("the chunks are written again", LIMIT, || server.metrics().tier("chunks", "rocks") >= whole_chunks);
    assert_eq!(server.settle().count("keepsake_kv_load_failures_total"), whole_chunks);

    let server = server.finish().start();
    let reply = next_turn(&server, &parent);
    assert_eq!(reply.text, expected.text);
    assert!(reply.usage.tier("rocks") >= 32 * whole_chunks, "{:?}", reply.usage);
    assert_eq!(server.settle().count("keepsake_kv_load_failures_total"), 0);
    server.finish();
}

/// Whatever happens to the files of `kv/` while the server is down: it starts, and conversations go on.
#[test]
fn no_damage_to_the_kv_folder_keeps_a_server_from_starting() {
    let (stopped, parent) = conversation_on_disk();
    let server = stopped.copy().start();
    let expected = next_turn(&server, &parent);
    server.finish();

    type Damage = fn(&Path);
    let damages: [(&str, Damage); 8] = [
        ("blob files torn", |kv| files(kv, ".blob").iter().for_each(|file| tear(file))),
        ("blob files gone", |kv| files(kv, ".blob").iter().for_each(|file| fs::remove_file(file).expect("a file"))),
        ("tables flipped", |kv| files(kv, ".sst").iter().for_each(|file| flip_bits(file, 64))),
        ("tables torn", |kv| files(kv, ".sst").iter().for_each(|file| tear(file))),
        ("tables gone", |kv| files(kv, ".sst").iter().for_each(|file| fs::remove_file(file).expect("a file"))),
        ("manifest flipped", |kv| manifests(kv).iter().for_each(|file| flip_bits(file, 16))),
        ("CURRENT empty", |kv| fs::write(kv.join("CURRENT"), "").expect("a writable file")),
        ("everything gone", |kv| fs::remove_dir_all(kv).expect("a folder")),
    ];
    for (name, damage) in damages {
        let damaged = stopped.copy();
        damage(&damaged.rocks().join("kv"));
        let server = damaged.start();
        let reply = next_turn(&server, &parent);
        assert_eq!((&reply.text, reply.usage.input), (&expected.text, expected.usage.input), "{name}");
        let again = next_turn(&server, &reply);
        let more = next_turn(&server, &again);
        assert!(more.usage.cached > 0, "{name}: {:?}", more.usage);
        // A damaged database may well be logged as an error.
        server.finish_alarmed();
    }
}

fn manifests(kv: &Path) -> Vec<PathBuf> {
    files(kv, "").into_iter().filter(|path| path.to_string_lossy().contains("/MANIFEST-")).collect()
}

/// A disk of 64 MB that someone else fills: serving goes on, and all is as before when there is room again.
#[test]
fn a_full_disk_stops_storing_but_not_serving() {
    let Some(disk) = SmallDisk::mount(64) else {
        // Past the capture of a passing test's output: a skip is to be seen.
        let skipped = "SKIPPED a_full_disk_stops_storing_but_not_serving: mounting a tmpfs takes root";
        writeln!(std::io::stderr(), "{skipped}").expect("standard error is open");
        return;
    };
    let settings = Settings::tiers(ModelKind::Tiny, 96, 0, 1500)
        .set("scheduler", "swap_out_below", "1.0")
        .rocks_folder(&disk.path().join("rocks"))
        .turns_bytes(16 << 20);
    let server = Server::start(settings);
    let client = &server.client;
    let first = ask(0).send(client);
    let second = ask(1).after(&first.id).send(client);
    let before = server.settle();
    assert_eq!(before.count("keepsake_store_read_only"), 0);

    let filler = disk.fill();
    let mut num_refused = 0;
    let mut turn = 100;
    wait_until("the server notices the full disk", LIMIT, || {
        turn += 1;
        let unstored = ask(turn).with("store", json!(false)).send(client);
        assert_eq!(unstored.usage.output, 20);
        // A stored turn is either on disk or refused with the reason; there is nothing between.
        let answer = client.post("/v1/responses", &ask(turn + 1000).body());
        if answer.status != 200 {
            assert_eq!((answer.status, answer.refusal().as_str()), (503, "store_unavailable"), "{}", answer.text);
            num_refused += 1;
        }
        server.metrics().count("keepsake_store_read_only") == 1 && num_refused > 0
    });
    // What was acknowledged is still readable and can be gone on from, unstored.
    assert_eq!(client.get(&format!("/v1/responses/{}", first.id)).status, 200);
    let while_full = ask(2).after(&second.id).with("store", json!(false)).send(client);

    drop(filler);
    wait_until("the server writes again by itself", Duration::from_secs(90), || {
        server.metrics().count("keepsake_store_read_only") == 0
    });
    let third = ask(2).after(&second.id).send(client);
    assert_eq!(third.text, while_full.text);
    let moved = server.metrics().sum("keepsake_moves_total", "to=\"rocks\"");
    ask(3).max(60).send(client);
    wait_until("chunks go to disk again", LIMIT, || {
        server.metrics().sum("keepsake_moves_total", "to=\"rocks\"") > moved
    });
    // Turns that could not be stored were logged as what they are.
    let server = server.finish_alarmed().start();
    let fourth = ask(4).after(&third.id).send(&server.client);
    assert!(fourth.usage.input > third.usage.input);
    assert!(folder_bytes(&server.rocks()) < 64 << 20);
    server.finish();
}

/// The cap is on what lies on the disk, not on what was meant to be there.
#[test]
fn the_kv_folder_stays_within_its_cap() {
    let chunks = 400;
    let settings = Settings::tiers(ModelKind::Tiny, 64, 0, chunks).set("scheduler", "swap_out_below", "1.0");
    let cap = settings.tier_bytes(chunks);
    let server = Server::start(settings);
    let mut peak = 0;
    // Four times the cap goes through it.
    let mut seed = 0;
    while server.metrics().sum("keepsake_move_bytes_total", "to=\"rocks\"") < 4.0 * cap as f64 {
        seed += 1;
        assert!(seed < 2000, "chunks do not reach the disk");
        Ask::new(&words::plain(&mut words::seeded(seed), 60)).max(100).send(&server.client);
        peak = peak.max(folder_bytes(&server.rocks().join("kv")));
    }
    assert!(peak <= cap + cap / 10, "{peak} bytes on disk, the cap is {cap}");
    let stopped = server.finish();
    let at_rest = folder_bytes(&stopped.rocks().join("kv"));
    assert!(at_rest <= cap, "{at_rest} bytes on disk after the end, the cap is {cap}");
}
