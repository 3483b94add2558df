"""Model files: conversion into Hugging Face folders."""
