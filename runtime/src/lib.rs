//! The Keepsake server.
//!
//! [`core`] decides, [`actors`] move messages, [`conversation`] turns requests into tokens and replies into logs, [`http`] speaks
//! OpenAI's wire formats, [`calibrate`] measures what work costs, [`gateway`] stands between HTTP and sessions, [`app`] wires all of it and takes it down again.
//!
//! May depend on every other crate of the workspace; the only one that knows actix, actix-web and tokio.

pub mod actors;
pub mod app;
pub mod calibrate;
pub mod cli;
pub mod conversation;
pub mod core;
pub mod gateway;
pub mod http;
pub mod messages;
pub mod simulate;
pub mod telemetry;
pub mod trace;
