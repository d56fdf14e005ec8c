//! Clients that go away, over a real socket: their turns must be dropped, whether or not they stream.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config;
use super::fake::{Fake, Script};
use crate::http::bind_service;

const PATIENCE: Duration = Duration::from_secs(10);

/// Sends a chat completion that will never be answered in full and waits until `open` turns run.
fn start(address: SocketAddr, fake: &Fake, stream: bool, open: usize) -> TcpStream {
    let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "stream": {stream}}}"#);
    let mut socket = connect(address);
    socket.write_all(head(body.len()).as_bytes()).expect("the head is taken");
    socket.write_all(body.as_bytes()).expect("the body is taken");
    wait_for(fake, open);
    socket
}

fn connect(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).expect("the server listens");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    socket
}

fn head(length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

fn wait_for(fake: &Fake, open: usize) {
    let started = Instant::now();
    while fake.open.load(Ordering::SeqCst) != open {
        assert!(started.elapsed() < PATIENCE, "{} turns open, expected {open}", fake.open.load(Ordering::SeqCst));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn with_server(script: Script, ping: Duration, check: impl FnOnce(SocketAddr, Arc<Fake>) + Send + 'static) {
    let fake = Fake::new(script);
    let mut config = config();
    config.server.bind = "127.0.0.1:0".parse().expect("an address");
    config.server.keep_alive_ping = ping;
    config.server.shutdown_deadline = Duration::from_secs(1);
    actix_web::rt::System::new().block_on(async move {
        let (server, addresses) = bind_service(&config, fake.clone()).expect("a free port");
        let handle = server.handle();
        let server = actix_web::rt::spawn(server);
        actix_web::web::block(move || check(addresses[0], fake)).await.expect("the check passes");
        handle.stop(false).await;
        server.await.expect("no panic").expect("stops cleanly");
    });
}

#[test]
fn a_client_that_leaves_drops_its_turn() {
    with_server(Script::Hang, Duration::from_secs(60), |address, fake| {
        for stream in [false, true] {
            let socket = start(address, &fake, stream, 1);
            drop(socket);
            wait_for(&fake, 0);
            // Half closed: it could still read an answer, but see `bind`.
            let socket = start(address, &fake, stream, 1);
            socket.shutdown(Shutdown::Write).expect("still connected");
            wait_for(&fake, 0);
        }
        assert_eq!(fake.turns.lock().len(), 4);
    });
}

#[test]
fn a_client_that_stays_keeps_its_turn_and_hears_pings() {
    with_server(Script::Hang, Duration::from_millis(50), |address, fake| {
        let mut socket = start(address, &fake, true, 1);
        let mut heard = String::new();
        let mut buffer = [0; 4096];
        while heard.matches(": ping").count() < 3 {
            let length = socket.read(&mut buffer).expect("pings keep coming");
            assert!(length > 0, "the server closed the stream after {heard}");
            heard.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        assert!(heard.contains("text/event-stream"), "{heard}");
        assert_eq!(fake.open.load(Ordering::SeqCst), 1);

        let silent = start(address, &fake, false, 2);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(fake.open.load(Ordering::SeqCst), 2, "a waiting client without streaming keeps its turn");
        drop(silent);
        wait_for(&fake, 1);
    });
}

#[test]
fn a_body_over_the_limit_is_answered_while_the_client_still_sends() {
    let reply = Script::Reply(vec!["x"], crate::messages::session::FinishReason::Stop);
    with_server(reply, Duration::from_secs(60), |address, fake| {
        let length = 10_000_000;
        let mut socket = connect(address);
        socket.write_all(head(length).as_bytes()).expect("the head is taken");
        socket.write_all(&vec![b' '; length]).expect("the server reads on for a while");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer, then the end");
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
        assert!(answer.contains("request_too_large"), "{answer}");
        assert!(fake.turns.lock().is_empty());
    });
}
